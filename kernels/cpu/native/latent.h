// Latent attention (backend/architectures/latent.py, arXiv:2405.04434): all heads read one latent of each token, which is its key and its value.
//
// The phases before and after the attention, whose keys are [rotated, rank] and whose values [rank, zeros]:
//     norm to operand | inputs product | (norm to operand | queries product) | plain queries to operand, keys and values | keys product by head
//     attention | latents to operand | values product by head
#pragma once
#include "layer.h"

namespace everbatch {

// The product of a layer [heads * n, k] of which each head has its rows, and an input of its own: row `head * rows + r` of `a` is that of row r.
// put(row, head, column, sums) gets 32 sums of a head's n, which is a multiple of 32.
template <class T, class Put>
void linear_by_head(Team& team, const Linear& l, int64_t heads, const Operand& a, int64_t rows, Put put) {
    static thread_local Buffer<float> scratch;
    const int64_t panels = l.panels() / heads;
    for (int64_t row0 = 0; row0 < rows; row0 += MAX_ROWS) {
        const int count = int(std::min<int64_t>(MAX_ROWS, rows - row0));
        const auto with_head = [&](int64_t head, auto f) {
            auto panel_at = [=](int64_t i) { return head * panels + i; };
            auto of_head = [&](int64_t r, int64_t column, const float* sums) { put(r - head * rows, head, column - head * panels * PANEL, sums); };
            f(Pass<T, 1, decltype(panel_at), decltype(of_head)>(l, a, head * rows + row0, count, panels, panel_at, of_head, team.size));
        };
        int64_t items = 0;
        with_head(0, [&](const auto& pass) { items = pass.items(), scratch.grow(pass.scratch_size()); });
        team.for_each(heads * items, [&](int64_t item) {
            with_head(item / items, [&](const auto& pass) { pass.run(item % items, scratch.data()); });
        });
    }
}

template <class T>
class LatentAttention {
public:
    // y, attended: [tokens] rows of queries, key and value, and of the heads' results, so many floats apart.
    struct Flat {
        float* y;
        int64_t y_ld;
        float* attended;
        int64_t attended_ld;
        int64_t tokens;
    };

    LatentAttention(const everbatch_latent& l, int64_t heads, const Flat& flat, LatentMemory& memory)
        : l_(l), heads_(heads), dim_(l.rotated + l.rank), flat_(flat), w_(memory) {}

    static int64_t results(const everbatch_latent& l, int64_t heads) { return heads * std::max(l.value_dim, l.rotated + l.rank); }
    // Floats that a thread's row needs.
    static int64_t widest(const everbatch_latent& l) { return std::max({l.queries.depth(), l.keys.depth(), l.values.depth()}); }

    static void make_room(const everbatch_latent& l, const Linear& inputs, int64_t heads, int64_t tokens, LatentMemory& w) {
        w.inputs.grow(size_t(tokens * row_length(inputs.n))), w.queries.grow(size_t(tokens * row_length(l.queries.n)));
        if (l.queries.n) w.of_queries.shape(l.queries, tokens, sizeof(T));
        w.plain.shape(l.keys, tokens * heads, sizeof(T)), w.latents.shape(l.values, tokens * heads, sizeof(T));
    }

    // Makes queries, keys and values of the inputs of all tokens. row: of this thread.
    void begin(Team& team, const Linear& inputs, const Operand& operand, float* row) {
        const int64_t ld = row_length(inputs.n), queries_ld = row_length(l_.queries.n), tokens = flat_.tokens;
        float *in = w_.inputs.data(), *projected = w_.queries.data();
        linear<T>(team, inputs, operand, tokens, [=](int64_t r, int64_t column, const float* sums) { memcpy(in + r * ld + column, sums, PANEL * sizeof(float)); });
        if (l_.queries.n) {
            team.for_each(tokens, [&](int64_t t) {
                rms_norm(in + t * ld, l_.query_norm.weight, l_.queries.k, l_.eps, row);
                w_.of_queries.put(t, row);
            });
            linear<T>(team, l_.queries, w_.of_queries.view(), tokens,
                      [=](int64_t r, int64_t column, const float* sums) { memcpy(projected + r * queries_ld + column, sums, PANEL * sizeof(float)); });
        }
        team.for_each(tokens, [&](int64_t t) {
            const float* of_token = in + t * ld;
            const float* query = l_.queries.n ? projected + t * queries_ld : of_token;
            const float *latent = of_token + inputs.n - dim_, *rotated = of_token + inputs.n - l_.rotated;
            float *y = flat_.y + t * flat_.y_ld, *key = y + heads_ * dim_, *value = key + dim_;
            for (int64_t h = 0; h < heads_; h++, query += l_.plain + l_.rotated) {
                memcpy(row, query, size_t(l_.plain) * sizeof(float));
                w_.plain.put(h * tokens + t, row);
                memcpy(y + h * dim_, query + l_.plain, size_t(l_.rotated) * sizeof(float));
            }
            memcpy(key, rotated, size_t(l_.rotated) * sizeof(float));
            rms_norm(latent, l_.norm.weight, l_.rank, l_.eps, key + l_.rotated);
            memcpy(value, key + l_.rotated, size_t(l_.rank) * sizeof(float));
            std::fill(value + l_.rank, value + dim_, 0.0f);
        });
        linear_by_head<T>(team, l_.keys, heads_, w_.plain.view(), tokens, [&](int64_t t, int64_t head, int64_t column, const float* sums) {
            memcpy(flat_.y + t * flat_.y_ld + head * dim_ + l_.rotated + column, sums, PANEL * sizeof(float));
        });
    }

    // Makes the heads' results of what attention has yielded for the picked tokens, in its place.
    void finish(Team& team, const std::vector<int64_t>& picked, float* row) {
        const int64_t rows = int64_t(picked.size());
        team.for_each(rows, [&](int64_t r) {
            for (int64_t h = 0; h < heads_; h++) {
                memcpy(row, flat_.attended + picked[size_t(r)] * flat_.attended_ld + h * dim_, size_t(l_.rank) * sizeof(float));
                w_.latents.put(h * rows + r, row);
            }
        });
        linear_by_head<T>(team, l_.values, heads_, w_.latents.view(), rows, [&](int64_t r, int64_t head, int64_t column, const float* sums) {
            memcpy(flat_.attended + picked[size_t(r)] * flat_.attended_ld + head * l_.value_dim + column, sums, PANEL * sizeof(float));
        });
    }

private:
    const everbatch_latent& l_;
    const int64_t heads_, dim_;
    const Flat flat_;
    LatentMemory& w_;
};

}  // namespace everbatch
