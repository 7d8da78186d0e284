// The attention of a flat batch: keys and values go to the pool, and every token attends to those of its sequence.
#pragma once
#include "spans.h"

namespace everbatch {

inline void convert(const float* x, int64_t n, float* out) { memcpy(out, x, size_t(n) * sizeof(float)); }
inline void convert(const float* x, int64_t n, bf16* out) {
    for (int64_t i = 0; i < n; i += LANES) store_bf16(out + i, load<Vec>(x + i));
}

// Memory that is kept between steps.
struct AttentionMemory {
    struct Thread {
        Buffer<float> vectors;  // a query or key, and a value
        AttentionScratch<float> of_floats;
        AttentionScratch<bf16> of_halves;

        AttentionScratch<float>& scratch(float) { return of_floats; }
        AttentionScratch<bf16>& scratch(bf16) { return of_halves; }
    };
    Buffer<float> partials;
    Buffer<char> queries;
    std::vector<Thread> threads;
};

// Which keys a layer's tokens see: those of the last `window` positions (0: all), and of the first `sink_tokens`.
struct Sight {
    int64_t window, sink_tokens;
};

// T: the type that is computed in.
template <class T>
class BatchAttention {
public:
    BatchAttention(const everbatch_batch& b, const KVLayout& kv, int64_t heads, AttentionMemory& memory)
        : b_(b), kv_(kv), memory_(memory), group_(kv.kv_heads ? int(heads / kv.kv_heads) : 1), dim_(kv.dim()) {
        for (int64_t r = 0; r < b.num_rows; r++) tokens_ += b.rows[r].num_tokens;
        units_ = cut(b, PANEL, PANEL);
        queries_ = cut(b, std::max(1, ROWS_TOGETHER / group_), 0);
        spans_.share(queries_, kv.kv_heads, group_, dim_, b.ends);
        memory.partials.grow(spans_.partials());
        memory.queries.grow(size_t(tokens_ * heads * dim_) * sizeof(T));
        if (memory.threads.size() < size_t(b.threads)) memory.threads = std::vector<AttentionMemory::Thread>(size_t(b.threads));
        for (auto& thread : memory.threads) thread.vectors.grow(size_t(2 * dim_));
    }

    // The rows' tokens in pieces, none of which crosses the border of a panel.
    const std::vector<Piece>& units() const { return units_; }

    // Writes the keys and values of all tokens to a layer's pool, and, if results are wanted, attends. A token is named by its index in
    // the flat batch. source.query(token, position, head, out [head_dim]), source.key(...) and source.value(...) yield what is ready for the
    // products; put(token, head, acc, factor) takes the results: head_dim numbers, each to be multiplied with the factor.
    template <class Source, class Put>
    void run(Team& team, char* pool, const Sight& sight, const Scoring& scoring, bool is_wanted, Source source, Put put) {
        const auto of_cells = [&](auto key, auto value) {
            using K = decltype(key);
            using V = decltype(value);
            append<K, V>(team, pool, source);
            if (is_wanted) attend<K, V>(team, pool, sight, scoring, put);
        };
        if (!kv_.is_quantized())
            of_cells(T(), T());
        else if (kv_.key_bits == 4)
            of_cells(Int4(), Int4());
        else if (kv_.value_bits == 4)
            of_cells(int8_t(), Int4());
        else
            of_cells(int8_t(), int8_t());
    }

private:
    T* queries() { return reinterpret_cast<T*>(memory_.queries.data()); }  // [kv heads][tokens][group][dim]
    const int32_t* table(const Piece& piece) const { return b_.block_tables + b_.rows[piece.row].slot * b_.max_blocks; }

    // K, V: the types of the pool's keys and values.
    template <class K, class V, class Source>
    void append(Team& team, char* pool, Source& source) {
        const int64_t kv_heads = kv_.kv_heads, d = kv_.head_dim, items = int64_t(units_.size()) * kv_heads;
        float *vector = memory_.threads[size_t(team.id)].vectors.data(), *value = vector + dim_;
        const HeadRotation rotation(d);
        std::fill(vector + d, vector + dim_, 0.0f), std::fill(value + d, value + dim_, 0.0f);
        const auto head_of = [&](int64_t item) {
            const Piece& piece = units_[size_t(item / kv_heads)];
            return KVHead{kv_, pool + table(piece)[piece.position / kv_.block_size] * kv_.block_bytes() + item % kv_heads * kv_.head_bytes()};
        };
        team.for_each(items, [&](int64_t item) {
            const Piece& piece = units_[size_t(item / kv_heads)];
            const int64_t h = item % kv_heads, next = std::min(item + 1, items - 1);
            const KVHead head = head_of(item);
            prefetch_cell<K, V>(head_of(next), int(units_[size_t(next / kv_heads)].position % kv_.block_size));
            for (int t = 0; t < piece.count; t++) {
                const int64_t position = piece.position + t, token = piece.first + t;
                for (int g = 0; g < group_; g++) {
                    source.query(token, position, h * group_ + g, vector);
                    if constexpr (BITS<K> <= 8) rotation.query(vector);
                    convert(vector, dim_, queries() + ((h * tokens_ + token) * group_ + g) * dim_);
                }
                source.key(token, position, h, vector);
                if constexpr (BITS<K> <= 8) rotation.key(vector);
                source.value(token, h, value);
                write_cell<K, V>(head, int(position % kv_.block_size), vector, value);
            }
        });
    }

    template <class K, class V, class Put>
    void attend(Team& team, const char* pool, const Sight& sight, const Scoring& scoring, Put& put) {
        const int64_t kv_heads = kv_.kv_heads, items = int64_t(spans_.all.size()) * kv_heads;
        const auto walk_of = [&](int64_t item) {
            const Piece& piece = queries_[size_t(spans_.all[size_t(item / kv_heads)].piece)];
            return Walk(kv_, pool, int(item % kv_heads), table(piece), piece.position, piece.count, b_.ends ? b_.ends + piece.first : nullptr,
                        sight.window, sight.sink_tokens);
        };
        team.for_each(items, [&](int64_t item) {
            const int64_t following = std::min(item + 1, items - 1), h = item % kv_heads;
            const Walk walk = walk_of(item), next = walk_of(following);
            const Ahead ahead = next.first_panels(next.segment_from(int64_t(spans_.all[size_t(following / kv_heads)].split) * SPLIT));
            const Span& span = spans_.all[size_t(item / kv_heads)];
            const int64_t first = queries_[size_t(span.piece)].first;
            Scoring of_heads = scoring;
            if (scoring.sinks) of_heads.sinks += h * group_;
            Attention<T, K, V> attention(kv_, walk, group_, queries() + (h * tokens_ + first) * group_ * dim_, of_heads,
                                         memory_.threads[size_t(team.id)].scratch(T()));
            const auto put_row = [&](int t, int g, const float* acc, float factor) { put(first + t, h * group_ + g, acc, factor); };
            if (span.splits == 1) return attention.whole(ahead, put_row);
            float* partials = memory_.partials.data() + spans_.partial_of(span, h);
            attention.split(span.split, ahead);
            attention.store_split(partials + size_t(span.split) * spans_.partial_size);
            if (spans_.is_last(span, h)) attention.merged(partials, span.splits, spans_.partial_size, put_row);
        });
    }

    const everbatch_batch& b_;
    const KVLayout& kv_;
    AttentionMemory& memory_;
    const int group_, dim_;
    int64_t tokens_ = 0;
    std::vector<Piece> units_, queries_;
    Spans spans_;
};

// Whether a row's tokens are possible. max_tokens: of a sequence.
inline bool has_tokens(const everbatch_row& row, int64_t max_tokens) {
    return row.num_computed >= 0 && row.num_tokens >= 1 && int64_t(row.num_computed) + row.num_tokens <= max_tokens;
}

// Whether a row's tokens are possible, and its slot's table has the blocks that its tokens see. max_tokens: of a sequence. sight: of the layer
// that sees most.
inline bool has_blocks(const everbatch_row& row, const everbatch_batch& b, const KVLayout& kv, int64_t max_tokens, const Sight& sight) {
    const int64_t end = int64_t(row.num_computed) + row.num_tokens, block_size = kv.block_size;
    if (!has_tokens(row, max_tokens)) return false;
    if ((end + block_size - 1) / block_size > b.max_blocks) return false;
    const int32_t* table = b.block_tables + row.slot * b.max_blocks;
    const int64_t sink_blocks = (sight.sink_tokens + block_size - 1) / block_size;
    const int64_t in_window = sight.window ? std::max<int64_t>(0, row.num_computed - sight.window + 1) / block_size : 0;
    for (int64_t block = 0; block * block_size < end; block++) {
        if (block == sink_blocks) block = std::max(block, in_window);  // blocks in between may have been let go
        if (table[block] < 0 || table[block] >= b.num_blocks) return false;
    }
    return true;
}

}  // namespace everbatch
