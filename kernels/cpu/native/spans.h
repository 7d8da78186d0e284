// What is done as one item of a step's work: pieces of rows, and of attention spans of their keys.
#pragma once
#include "api.h"

namespace everbatch {

constexpr int FEW_TOKENS = 4;  // of a row: so few do not give every thread something to do, so that threads share their keys

struct Piece {  // consecutive tokens of one row
    int32_t row, first, count;  // first: index in the flat batch
    int32_t position;           // the first one's position in its sequence
};

// Cut each row's tokens into pieces of at most `max_tokens` that do not cross a position that is a multiple of `border` (0: none).
inline std::vector<Piece> cut(const everbatch_batch& b, int max_tokens, int border) {
    std::vector<Piece> pieces;
    int32_t flat = 0;
    for (int64_t r = 0; r < b.num_rows; r++) {
        const everbatch_row& row = b.rows[r];
        for (int done = 0; done < row.num_tokens;) {
            const int at = row.num_computed + done;
            int count = std::min(max_tokens, row.num_tokens - done);
            if (border) count = std::min(count, border - at % border);
            pieces.push_back({int32_t(r), flat, count, at});
            flat += count, done += count;
        }
    }
    return pieces;
}

// Some work of attention for each kv head: all keys of a piece, or one split of them.
struct Span {
    int32_t piece;
    int32_t split, splits;  // 0 of 1: all keys
    int32_t first;          // of the piece's splits among all splits
};

// The spans of some pieces. Those of few tokens and many keys are split, so that threads share their keys evenly.
class Spans {
public:
    std::vector<Span> all;
    size_t partial_size = 0;  // floats of the result of a split, of one kv head

    // ends: as in everbatch_batch.
    void share(const std::vector<Piece>& pieces, int64_t kv_heads, int group, int dim, const int32_t* ends) {
        kv_heads_ = kv_heads;
        int32_t tokens = 0;
        for (size_t i = 0; i < pieces.size(); i++) {
            const Piece& piece = pieces[i];
            const int32_t end = ends ? ends[piece.first + piece.count - 1] : piece.position + piece.count;
            const int32_t count = piece.count > FEW_TOKENS ? 1 : (end + SPLIT - 1) / SPLIT;
            for (int32_t split = 0; split < count; split++) all.push_back({int32_t(i), split, count, splits_});
            if (count > 1) splits_ += count, tokens = std::max(tokens, piece.count);
        }
        partial_size = size_t(tokens) * group * (dim + 2);
        done_ = std::vector<std::atomic<int32_t>>(size_t(splits_) * kv_heads);
    }

    size_t partials() const { return size_t(splits_) * kv_heads_ * partial_size; }
    // Where the results of all splits of the span's piece begin, for one kv head.
    size_t partial_of(const Span& span, int64_t head) const { return size_t(first(span, head)) * partial_size; }

    // Whether this is the last split of its piece and kv head that gets done. To be called once for each.
    bool is_last(const Span& span, int64_t head) {
        std::atomic<int32_t>& done = done_[first(span, head)];
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < span.splits) return false;
        done.store(0, std::memory_order_relaxed);  // for the next layer
        return true;
    }

private:
    int64_t first(const Span& span, int64_t head) const { return span.first * kv_heads_ + head * span.splits; }

    int64_t kv_heads_ = 1;
    int32_t splits_ = 0;
    std::vector<std::atomic<int32_t>> done_;  // [splits][kv heads]; the first of a piece and head counts
};

}  // namespace everbatch
