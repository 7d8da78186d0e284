// The order in which attention reads a KV pool.
#pragma once
#include "kv_pool.h"

namespace everbatch {

constexpr int SEGMENT = 256;  // positions that share a step of the softmax (attention.h)
constexpr int AHEAD = 2;      // panels that are fetched in advance

// The first panels of an item of work, which the one before it fetches.
struct Ahead {
    const char* at[AHEAD] = {};
};

// The order in which attention reads one kv head of a sequence, for `tokens` positions from `position` on: segment by segment, first
// the panels of keys and then those of values.
class Walk {
public:
    // table: the sequence's block ids. ends: of the tokens, as in everbatch_batch. window: tokens that a query sees, itself included, besides
    // the sink tokens; 0 = all.
    Walk(const KVLayout& l, const char* pool, int kv_head, const int32_t* table, int64_t position, int tokens, const int32_t* ends,
         int64_t window, int64_t sink_tokens)
        : position(position), tokens(tokens), ends_(ends), end(end_of(tokens - 1)), window(window), sink_tokens(window ? sink_tokens : 0),
          first_key_(window ? std::max<int64_t>(0, position - window + 1) : 0),
          sink_end_((this->sink_tokens + PANEL - 1) / PANEL * PANEL), l_(l), pool_(const_cast<char*>(pool)), kv_head_(kv_head),
          table_(table) {}

    const int64_t position;
    const int tokens;

private:
    const int32_t* const ends_;

public:
    const int64_t end;  // one past the last key that is seen
    const int64_t window, sink_tokens;

    // One past the last key that a token sees.
    int64_t end_of(int token) const { return ends_ ? ends_[token] : position + token + 1; }

    int64_t first_segment() const { return sink_end_ ? 0 : from_window(); }
    int64_t next_segment(int64_t segment) const {
        const int64_t next = segment_end(segment);
        return next < sink_end_ ? next : std::max(next, from_window());
    }
    // The first segment that begins at `key`, a multiple of SEGMENT, or after it.
    int64_t segment_from(int64_t key) const {
        return key == 0 ? first_segment() : key < sink_end_ ? key : std::max(key, from_window());
    }
    int64_t from(int64_t segment) const { return segment < sink_end_ ? segment : std::max(segment, first_key_ / PANEL * PANEL); }
    int64_t to(int64_t segment) const { return std::min(segment_end(segment), (end + PANEL - 1) / PANEL * PANEL); }

    KVHead head(int64_t key) const {
        return {l_, pool_ + table_[key / l_.block_size] * l_.block_bytes() + kv_head_ * l_.head_bytes()};
    }
    int unit(int64_t key) const { return int(key % l_.block_size / PANEL); }

    // None if the segment is beyond the keys.
    Ahead first_panels(int64_t segment) const {
        Ahead ahead;
        if (segment >= end) return ahead;
        for (int i = 0; i < AHEAD; i++) {
            const int64_t key = std::min(from(segment) + i * PANEL, to(segment) - PANEL);
            ahead.at[i] = head(key).keys(unit(key));
        }
        return ahead;
    }

private:
    int64_t segment_end(int64_t segment) const {
        const int64_t next = segment / SEGMENT * SEGMENT + SEGMENT;
        return segment < sink_end_ ? std::min(next, sink_end_) : next;
    }
    // The segment in which the window begins.
    int64_t from_window() const { return std::max(sink_end_, first_key_ / SEGMENT * SEGMENT); }

    const int64_t first_key_;  // the first that is in the window of the first query
    const int64_t sink_end_;   // one past the panels of the sink tokens
    const KVLayout& l_;
    char* const pool_;
    const int kv_head_;
    const int32_t* const table_;
};

}  // namespace everbatch
