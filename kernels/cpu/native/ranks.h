// Ranks: processes that run a model together (docs/design/ranks.md). A stage has a range of the layers, and its ranks have a part of each of
// these.
//
// All ranks share memory, or each has a copy, which they keep alike where another rank reads it (links.h):
//
//     lost | marks of each stage | marks of each rank | best logits [rank][row] | sums [stage][2][rank][row][hidden]
//     | logits [row][vocab] | hidden states [stage][row][hidden]
//
// All ranks run the same steps. Within a stage they meet. A meeting is a barrier: each rank counts its own arrival, and goes on when the counters
// of all others have reached the same number. After a barrier a rank may read what the others wrote before it. There are two buffers of sums,
// used in turns: before a rank writes to the same buffer again it passes another barrier, where the others arrive only after they have read it.
// Every rank adds the sums in the order of the ranks, so all get the same bits.
//
// Between stages there are handovers: a stage puts the hidden states behind its last layer into its buffer and counts that, and the ranks of the
// next stage wait for that count. Each micro-batch of a step has rows of its own in the buffer, and the next step begins when the last stage
// is done with this one, so nothing is overwritten that is still to be read.
//
// A rank counts as lost when the others have waited for it beyond the time limit, or when its process has ended. The others then wait for nobody
// any more: their step ends at once with wrong numbers, and everbatch_step returns the number of the lost rank, so that rank 0 discards them.
#pragma once
#include <time.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "links.h"
#include "team.h"

namespace everbatch {

struct Ranks {
    int32_t rank, size;     // of the ranks of a stage
    int32_t stage, stages;  // the first stage has the first layers
    int64_t rows;           // tokens of a step that there is room for
    int64_t hidden, vocab;
    int64_t first_token;  // of this rank's part of the vocabulary
    int64_t timeout_ms;   // how long one rank may keep another one waiting
    void* memory;         // everbatch_ranks_bytes() of it; zeros at first
    Links* links;         // to the other ranks; null: they share the memory
};

// The greatest logit that a rank has seen in a row, and its token.
struct Best {
    float value;
    int64_t id;

    void take(const Best& other) {
        if (other.value > value || (other.value == value && other.id < id)) *this = other;
    }
};

// The memory that ranks share, and how they wait for each other.
class RanksMemory {
public:
    explicit RanksMemory(const Ranks& ranks) : ranks_(ranks), ld_(row_length(ranks.hidden)), memory_(static_cast<char*>(ranks.memory)) {}

    int64_t num_bytes() const { return hidden_at(ranks_.stages - 1); }

    // Where the hidden states lie that a stage hands on, [row][hidden]; the last stage hands on none.
    int64_t hidden_at(int32_t stage) const { return logits_end() + stage * page(ranks_.rows * ranks_.hidden * int64_t(sizeof(float))); }

    // The number of a rank among those of all stages: the ranks of the last stage come first, because rank 0 is the one that samples.
    int32_t number(int32_t stage, int32_t rank) const { return (ranks_.stages - 1 - stage) * ranks_.size + rank; }

    // The number of the rank that is lost, or -1.
    int32_t lost() const { return lost_().load() - 1; }
    void give_up(int32_t number) {
        int32_t none = 0;  // no rank is lost yet; the first one that is lost stays
        if (!lost_().compare_exchange_strong(none, number + 1) || !ranks_.links) return;
        for_others([&](int32_t other) { ranks_.links->send_at_once(other, {Frame::LOST, -1, uint32_t(number), 0, 0, 0}); });
    }

    // Takes what the rank of this number sends. Returns when the connection has ended; that rank then counts as lost.
    void receive(int32_t number) {
        Frame frame;
        while (ranks_.links->read(number, &frame, sizeof(frame)) && is_sound(frame, number)) {
            if (frame.kind == Frame::LOST) {
                give_up(int32_t(frame.count));
                continue;
            }
            if (!ranks_.links->read(number, memory_ + frame.offset, frame.bytes)) break;
            if (frame.mark < 0) continue;
            if (frame.kind == Frame::BEAT)
                mark(frame.mark).beats.fetch_add(1, std::memory_order_relaxed);
            else
                count_to(mark(frame.mark), frame.count);
        }
        give_up(number);
    }

protected:
    struct Mark {
        std::atomic<uint32_t> count;
        std::atomic<int32_t> asleep;  // ranks that sleep until it counts on
        std::atomic<uint32_t> beats;  // of a stage: grows while it works
        uint32_t taken;               // number of micro-batches that this rank has taken from the stage before; no other rank reads it
    };
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

    static void count_on(Mark& mark) { count_to(mark, mark.count.load(std::memory_order_relaxed) + 1); }

    // Sends a rank what this one has written at `data`, and what a mark has counted to behind it; -1: no mark.
    void put(int32_t number, const void* data, int64_t bytes, int32_t index = -1) {
        const int64_t offset = bytes ? static_cast<const char*>(data) - memory_ : 0;
        const uint32_t count = index < 0 ? 0 : mark(index).count.load(std::memory_order_relaxed);
        send(number, {Frame::PUT, index, count, 0, offset, bytes}, data);
    }

    void send(int32_t number, const Frame& frame, const void* data) {
        int64_t naps = 0;
        const auto goes_on = [&] { return lost() < 0 && ++naps * NAP_MS < ranks_.timeout_ms; };
        if (lost() < 0 && !ranks_.links->send(number, frame, data, goes_on)) give_up(number);
    }

    // Calls f(number) for each other rank.
    template <class F>
    void for_others(F f) const {
        for (int32_t other = 0; other < ranks_.size * ranks_.stages; other++)
            if (other != number(ranks_.stage, ranks_.rank)) f(other);
    }

    int32_t stage_of(int32_t number) const { return ranks_.stages - 1 - number / ranks_.size; }

    // Returns when the mark has counted to `now`, or a rank is lost. beats(): a number that changes while those who are waited for work;
    // missing(): the rank to give up when the time limit is over without such a change.
    template <class Beats, class Missing>
    void wait_for(Mark& mark, uint32_t now, Beats beats, Missing missing) {
        for (int i = 0; i < SPINS; i++)
            if (has_counted(mark, now)) return;
        mark.asleep.fetch_add(1);
        int64_t naps = 0;  // a nap counts for NAP_MS even if this process was stopped for longer
        for (uint32_t last = beats(); !has_counted(mark, now) && lost() < 0;) {
            const timespec nap{0, NAP_MS * 1000000};
            if (futex(mark, FUTEX_WAIT, now - 1, &nap) == 0 || errno != ETIMEDOUT) continue;
            if (const uint32_t next = beats(); next != last) naps = 0, last = next;
            if (++naps * NAP_MS >= ranks_.timeout_ms) give_up(missing());
        }
        mark.asleep.fetch_sub(1);
    }

    static bool has_counted(const Mark& mark, uint32_t now) { return int32_t(mark.count.load() - now) >= 0; }

    int32_t index_of_stage(int32_t stage) const { return 1 + stage; }
    int32_t index_of_rank(int32_t stage, int32_t rank) const { return 1 + ranks_.stages + stage * ranks_.size + rank; }
    Mark& of_stage(int32_t stage) const { return mark(index_of_stage(stage)); }
    Mark& of_rank(int32_t stage, int32_t rank) const { return mark(index_of_rank(stage, rank)); }

    Best* best_at() const { return reinterpret_cast<Best*>(memory_ + marks_end()); }
    float* sums_at(int32_t stage) const {
        return reinterpret_cast<float*>(memory_ + best_end()) + int64_t(stage) * 2 * ranks_.size * ranks_.rows * ld_;
    }
    float* logits_at() const { return reinterpret_cast<float*>(memory_ + sums_end()); }

    const Ranks& ranks_;
    const int64_t ld_;
    char* const memory_;

private:
    static constexpr int SPINS = 100000;  // some 50 us
    static constexpr int64_t NAP_MS = Links::NAP_MS;
    static constexpr int64_t LINE = 128;  // bytes; two cache lines, which are fetched together

    static long futex(Mark& of, int operation, uint32_t value, const timespec* timeout) {
        return syscall(SYS_futex, &of.count, operation, value, timeout, nullptr, 0);
    }

    static void count_to(Mark& mark, uint32_t count) {
        mark.count.store(count);
        if (mark.asleep.load()) futex(mark, FUTEX_WAKE, INT_MAX, nullptr);
    }

    // True for a frame that the rank of this number may send.
    bool is_sound(const Frame& frame, int32_t number) const {
        const int32_t stage = stage_of(number), rank = number % ranks_.size;
        const bool is_of_stage = frame.mark == index_of_stage(stage) && rank == 0;
        switch (frame.kind) {
            case Frame::LOST:
                return frame.count < uint32_t(ranks_.size * ranks_.stages) && !frame.bytes;
            case Frame::BEAT:
                return frame.mark == index_of_stage(stage) && !frame.bytes && !frame.offset;
            case Frame::PUT:
                if (frame.mark != -1 && !is_of_stage && frame.mark != index_of_rank(stage, rank)) return false;
                if (!frame.bytes) return !frame.offset;
                return frame.offset >= marks_end() && frame.bytes > 0 && frame.offset <= num_bytes() && frame.bytes <= num_bytes() - frame.offset;
        }
        return false;
    }

    std::atomic<int32_t>& lost_() const { return *reinterpret_cast<std::atomic<int32_t>*>(memory_); }
    Mark& mark(int64_t index) const { return *reinterpret_cast<Mark*>(memory_ + LINE * index); }

    static int64_t page(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }
    int64_t of_several(int64_t bytes) const { return ranks_.size > 1 ? page(bytes) : 0; }  // what the ranks of a stage exchange
    int64_t marks_end() const { return page(LINE * (1 + ranks_.stages + ranks_.stages * ranks_.size)); }
    int64_t best_end() const { return marks_end() + of_several(ranks_.size * ranks_.rows * int64_t(sizeof(Best))); }
    int64_t sums_end() const {
        return best_end() + of_several(int64_t(ranks_.stages) * 2 * ranks_.size * ranks_.rows * ld_ * int64_t(sizeof(float)));
    }
    int64_t logits_end() const { return sums_end() + of_several(ranks_.rows * ranks_.vocab * int64_t(sizeof(float))); }
};

// What the ranks of a stage exchange.
class Meeting : public RanksMemory {
public:
    using RanksMemory::RanksMemory;

    // Where this rank puts its sums of row r before the next meeting, [hidden], whole panels.
    float* own_sums(int64_t r) { return sums(count() % 2, ranks_.rank, r); }

    // out = the sums of row r that all ranks put before the last meeting, in the order of the ranks.
    void add_up(int64_t r, float* out) {
        const uint32_t buffer = (count() - 1) % 2;
        memcpy(out, sums(buffer, 0, r), size_t(ranks_.hidden) * sizeof(float));
        for (int rank = 1; rank < ranks_.size; rank++) {
            const float* from = sums(buffer, rank, r);
            for (int64_t i = 0; i < ranks_.hidden; i++) out[i] += from[i];
        }
    }

    Best& best(int rank, int64_t r) { return best_at()[rank * ranks_.rows + r]; }
    float* logits(int64_t r) { return logits_at() + r * ranks_.vocab; }

    // Meets, so that all may add up the first `rows` rows of sums.
    void meet_with_sums(int64_t rows) { meet(own_sums(0), rows * ld_ * int64_t(sizeof(float))); }

    // Meets, so that rank 0 may read the greatest logits of the first `rows` rows, and, where `count` is not 0, `count` logits of each from `first`.
    void meet_with_logits(int64_t rows, int64_t first, int64_t count) {
        if (ranks_.links && ranks_.rank) {
            const int32_t reader = number(ranks_.stage, 0);
            put(reader, &best(ranks_.rank, 0), rows * int64_t(sizeof(Best)));
            for (int64_t r = 0; r < rows && count; r++) put(reader, logits(r) + first, count * int64_t(sizeof(float)));
        }
        meet(nullptr, 0);
    }

private:
    // Returns when all ranks of the stage have arrived as often as this one, or one is lost. data: what they may read then of what this one has written.
    void meet(const void* data, int64_t bytes) {
        count_on(of_rank(ranks_.stage, ranks_.rank));
        if (ranks_.links)
            for_others([&](int32_t other) {
                put(other, data, stage_of(other) == ranks_.stage ? bytes : 0, index_of_rank(ranks_.stage, ranks_.rank));
            });
        for (int rank = 0; rank < ranks_.size; rank++)
            if (rank != ranks_.rank)
                wait_for(of_rank(ranks_.stage, rank), count(), [] { return 0u; }, [&] { return number(ranks_.stage, rank); });
    }

    uint32_t count() const { return of_rank(ranks_.stage, ranks_.rank).count.load(std::memory_order_relaxed); }
    float* sums(uint32_t buffer, int rank, int64_t r) const {
        return sums_at(ranks_.stage) + ((buffer * ranks_.size + rank) * ranks_.rows + r) * ld_;
    }
};

// How hidden states go from stage to stage.
class Handover : public RanksMemory {
public:
    using RanksMemory::RanksMemory;

    // The next stage may read the hidden states of a micro-batch, which lie at `states`. Rank 0 of a stage calls it, for all its ranks have the
    // same.
    void hand_on(const float* states, int64_t tokens) {
        count_on(of_stage(ranks_.stage));
        if (!ranks_.links) return;
        const int64_t bytes = tokens * ranks_.hidden * int64_t(sizeof(float));
        for_others([&](int32_t other) {
            const int32_t stage = stage_of(other);
            if (stage > ranks_.stage) put(other, states, stage == ranks_.stage + 1 ? bytes : 0, index_of_stage(ranks_.stage));
        });
    }

    // Returns when the stage before has handed on another micro-batch, or a rank is lost. A stage that works shows that with every layer;
    // only while none of those before does, time counts.
    void take() {
        const uint32_t now = ++of_rank(ranks_.stage, ranks_.rank).taken;
        const auto beats = [&] {
            uint32_t sum = 0;
            for (int stage = 0; stage < ranks_.stage; stage++) sum += of_stage(stage).beats.load(std::memory_order_relaxed);
            return sum;
        };
        wait_for(of_stage(ranks_.stage - 1), now, beats, [&] { return missing(now); });
    }

    void beat() {
        of_stage(ranks_.stage).beats.fetch_add(1, std::memory_order_relaxed);
        if (!ranks_.links || !ranks_.links->is_time_to_beat()) return;
        for_others([&](int32_t other) {
            if (stage_of(other) > ranks_.stage) send(other, {Frame::BEAT, index_of_stage(ranks_.stage), 0, 0, 0, 0}, nullptr);
        });
    }

private:
    // The rank for which all others wait: in the first stage that has not handed on so many micro-batches, the one that has arrived at the
    // fewest meetings.
    int32_t missing(uint32_t now) const {
        int32_t stage = 0, last = 0;
        while (stage < ranks_.stage - 1 && has_counted(of_stage(stage), now)) stage++;
        const auto arrivals = [&](int32_t rank) { return of_rank(stage, rank).count.load(); };
        for (int32_t rank = 1; rank < ranks_.size; rank++)
            if (int32_t(arrivals(rank) - arrivals(last)) < 0) last = rank;
        return number(stage, last);
    }
};

}  // namespace everbatch
