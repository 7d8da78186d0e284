// Modules of a model whose other parts are run by other code. Their inputs and results are of the type that is computed in, T.
#include "mixture.h"

using namespace everbatch;

namespace {

void widen(const float* x, int64_t n, float* out) { memcpy(out, x, size_t(n) * sizeof(float)); }
void widen(const bf16* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = to_float(x[i]);
}
void narrow(const float* x, int64_t n, float* out) { memcpy(out, x, size_t(n) * sizeof(float)); }
void narrow(const float* x, int64_t n, bf16* out) {
    for (int64_t i = 0; i < n; i++) out[i] = to_bf16(x[i]);
}

// One row of floats for each thread, of `widest` elements.
void grow_rows(everbatch_workspace& w, int32_t threads, int64_t widest) {
    if (w.rows.size() < size_t(threads)) w.rows = std::vector<Buffer<float>>(size_t(threads));
    for (auto& row : w.rows) row.grow(size_t(widest));
}

// Multiplications of a batch's queries with keys, and of weights with values.
int64_t multiplications(const everbatch_attention& a, const everbatch_batch& b) {
    int64_t pairs = 0;  // of a token and one that it sees
    for (int64_t r = 0; r < b.num_rows; r++) {
        const int64_t longest = int64_t(b.rows[r].num_computed) + b.rows[r].num_tokens;
        pairs += b.rows[r].num_tokens * (a.window ? std::min(longest, a.window + a.sink_tokens) : longest);
    }
    return 2 * pairs * a.heads * a.kv.head_dim;
}

// Queries [tokens][heads][head_dim], keys and values [tokens][kv heads][head_dim].
template <class T>
struct Given {
    const T *q, *k, *v;
    int64_t heads, kv_heads, d;

    void query(int64_t token, int64_t, int64_t head, float* out) const { widen(q + (token * heads + head) * d, d, out); }
    void key(int64_t token, int64_t, int64_t head, float* out) const { widen(k + (token * kv_heads + head) * d, d, out); }
    void value(int64_t token, int64_t head, float* out) const { widen(v + (token * kv_heads + head) * d, d, out); }
};

// The same in one row of `ld` floats a token, before norms and rotation. cos, sin: [tokens][rotary_dim / 2].
struct Computed {
    const everbatch_attention_module& m;
    const float *y, *cos, *sin;
    int64_t ld;

    const float* of(int64_t token, int64_t head) const { return y + token * ld + head * m.attention.kv.head_dim; }
    void query(int64_t token, int64_t, int64_t head, float* out) const { turn(token, of(token, head), m.q_norm, out); }
    void key(int64_t token, int64_t, int64_t head, float* out) const { turn(token, of(token, m.attention.heads + head), m.k_norm, out); }
    void value(int64_t token, int64_t head, float* out) const {
        memcpy(out, of(token, m.attention.heads + m.attention.kv.kv_heads + head), size_t(m.attention.kv.head_dim) * sizeof(float));
    }
    void turn(int64_t token, const float* x, const Norm& norm, float* out) const {
        const int64_t d = m.attention.kv.head_dim, half = m.rotary_dim / 2, turned = 2 * half;
        alignas(64) float normed[MAX_HEAD_DIM];
        if (norm.weight) normalise(RMS, norm, x, d, m.eps, normed), x = normed;
        if (half) (m.is_interleaved ? rotate_neighbours : rotate_halves)(x, cos + token * half, sin + token * half, half, out);
        if (turned < d) memcpy(out + turned, x + turned, size_t(d - turned) * sizeof(float));
    }
};

template <class T>
void attend(const everbatch_attention& a, const everbatch_batch& b, const void* q, const void* k, const void* v, T* out, AttentionMemory& memory) {
    const int64_t d = a.kv.head_dim;
    const Given<T> given{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), a.heads, a.kv.kv_heads, d};
    BatchAttention<T> attention(b, a.kv, a.heads, memory);
    run_team(threads_for(multiplications(a, b), b.threads), [&](Team& team) {
        const TilesOfThread tiles;
        attention.run(team, b.pools[0], {a.window, a.sink_tokens}, a.scoring, true, given,
                      [&](int64_t token, int64_t head, const float* acc, float factor) {
                          alignas(64) float scaled[MAX_HEAD_DIM];
                          for (int64_t i = 0; i < d; i++) scaled[i] = acc[i] * factor;
                          narrow(scaled, d, out + (token * a.heads + head) * d);
                      });
    });
}

template <class T>
void attend_with_products(const everbatch_attention_module& m, const everbatch_batch& b, const T* x, const float* cos, const float* sin, T* out,
                          everbatch_workspace& w) {
    const everbatch_attention& a = m.attention;
    const int64_t d = a.kv.head_dim, y_ld = row_length(m.qkv.n), att_ld = row_length(m.out.k);
    int64_t tokens = 0;
    for (int64_t r = 0; r < b.num_rows; r++) tokens += b.rows[r].num_tokens;
    BatchAttention<T> attention(b, a.kv, a.heads, w.attention);
    OperandBuffer &input = w.normed[m.qkv.format], &results = w.heads[m.out.format];
    input.shape(m.qkv, tokens, sizeof(T)), results.shape(m.out, tokens, sizeof(T));
    w.y.grow(tokens * y_ld), w.attended.grow(tokens * att_ld);
    grow_rows(w, b.threads, std::max(m.qkv.depth(), m.out.depth()));
    const int64_t of_linears = tokens * (m.qkv.n * m.qkv.k + m.out.n * m.out.k);
    run_team(threads_for(of_linears + multiplications(a, b), b.threads), [&](Team& team) {
        const TilesOfThread tiles;
        float* row = w.rows[size_t(team.id)].data();
        team.for_each(tokens, [&](int64_t token) {
            widen(x + token * m.qkv.k, m.qkv.k, row);
            input.put(token, row);
        });
        linear<T>(team, m.qkv, input.view(), tokens,
                  [&](int64_t r, int64_t column, const float* sums) { memcpy(w.y.data() + r * y_ld + column, sums, PANEL * sizeof(float)); });
        attention.run(team, b.pools[0], {a.window, a.sink_tokens}, a.scoring, true, Computed{m, w.y.data(), cos, sin, y_ld},
                      [&](int64_t token, int64_t head, const float* acc, float factor) {
                          float* to = w.attended.data() + token * att_ld + head * d;
                          for (int64_t i = 0; i < d; i++) to[i] = acc[i] * factor;
                      });
        team.for_each(tokens, [&](int64_t token) {
            memcpy(row, w.attended.data() + token * att_ld, size_t(m.out.k) * sizeof(float));
            results.put(token, row);
        });
        linear<T>(team, m.out, results.view(), tokens, [&](int64_t r, int64_t column, const float* sums) {
            narrow(sums, std::min<int64_t>(PANEL, m.out.n - column), out + r * m.out.n + column);
        });
    });
}

template <class T>
void mix(const everbatch_mixture& m, const T* x, int64_t tokens, const int64_t* chosen, const float* weights, T* out, int32_t threads,
         everbatch_workspace& w) {
    const everbatch_mlp& first = m.experts[0];
    const int64_t hidden = first.gate_up.k, n = first.down.n, of_token = first.gate_up.n * hidden + n * first.down.k;
    grow_rows(w, threads, Mixture<T>::widest(m));
    w.mixture_counts.resize(1);
    Mixture<T> mixture(m, w.mixture, w.mixture_counts[0], w.rows, threads);
    run_team(threads_for(tokens * m.places * of_token, threads), [&](Team& team) {
        const TilesOfThread tiles;
        mixture.run(
            team, tokens, chosen, weights, nullptr, 0, [&](int64_t token, float* row) { widen(x + token * hidden, hidden, row); },
            [&](int64_t token, const float* sum) { narrow(sum, n, out + token * n); });
    });
}

template <class T>
void norm(const float* weight, float eps, const T* x, int64_t rows, int64_t n, T* out, int32_t threads, everbatch_workspace& w) {
    grow_rows(w, threads, n);
    run_team(threads_for(3 * rows * n, threads), [&](Team& team) {
        float* row = w.rows[size_t(team.id)].data();
        team.for_each(rows, [&](int64_t r) {
            widen(x + r * n, n, row);
            rms_norm(row, weight, n, eps, row);
            narrow(row, n, out + r * n);
        });
    });
}

// The first row that names a block that does not exist, or -1.
int64_t first_bad_row(const everbatch_attention& a, const everbatch_batch& b) {
    for (int64_t r = 0; r < b.num_rows; r++)
        if (!has_blocks(b.rows[r], b, a.kv, b.max_blocks * a.kv.block_size, {a.window, a.sink_tokens})) return r;
    return -1;
}

}  // namespace

extern "C" {

// Writes k and v [tokens][kv heads][head_dim] of a batch's tokens to the layer's pool, the first of b->pools, and attends with q
// [tokens][heads][head_dim], all of them normed and rotated. out is like q. Of the batch, rows, block tables, pools and threads are read.
// Returns -1. If a row names a block that does not exist, returns its index and writes nothing.
int64_t everbatch_attend(const everbatch_attention* a, const everbatch_batch* b, const void* q, const void* k, const void* v, void* out,
                         everbatch_workspace* w) {
    const int64_t bad = first_bad_row(*a, *b);
    if (bad >= 0) return bad;
    if (a->kv.element_bytes == 4)
        attend(*a, *b, q, k, v, static_cast<float*>(out), w->attention);
    else
        attend(*a, *b, q, k, v, static_cast<bf16*>(out), w->attention);
    return -1;
}

// The same from x [tokens][hidden], the input of the module, to its result [tokens][hidden]. cos, sin: [tokens][rotary_dim / 2].
int64_t everbatch_attend_with_products(const everbatch_attention_module* m, const everbatch_batch* b, const void* x, const float* cos,
                                       const float* sin, void* out, everbatch_workspace* w) {
    const int64_t bad = first_bad_row(m->attention, *b);
    if (bad >= 0) return bad;
    if (m->attention.kv.element_bytes == 4)
        attend_with_products(*m, *b, static_cast<const float*>(x), cos, sin, static_cast<float*>(out), *w);
    else
        attend_with_products(*m, *b, static_cast<const bf16*>(x), cos, sin, static_cast<bf16*>(out), *w);
    return -1;
}

// out [tokens][hidden]: the sum of the results of each token's experts for x [tokens][hidden], times their weights, in the order of its
// list. chosen, weights: [tokens][places]; an expert that does not exist counts as none. Null: every token has the first expert, times 1.
void everbatch_mix(const everbatch_mixture* m, const void* x, int64_t tokens, const int64_t* chosen, const float* weights,
                   int32_t element_bytes, void* out, int32_t threads, everbatch_workspace* w) {
    if (element_bytes == 4)
        mix(*m, static_cast<const float*>(x), tokens, chosen, weights, static_cast<float*>(out), threads, *w);
    else
        mix(*m, static_cast<const bf16*>(x), tokens, chosen, weights, static_cast<bf16*>(out), threads, *w);
}

// out [rows][n]: the RMS norm of the rows of x.
void everbatch_rms_norm(const float* weight, float eps, const void* x, int64_t rows, int64_t n, int32_t element_bytes, void* out,
                        int32_t threads, everbatch_workspace* w) {
    if (element_bytes == 4)
        norm(weight, eps, static_cast<const float*>(x), rows, n, static_cast<float*>(out), threads, *w);
    else
        norm(weight, eps, static_cast<const bf16*>(x), rows, n, static_cast<bf16*>(out), threads, *w);
}

}  // extern "C"
