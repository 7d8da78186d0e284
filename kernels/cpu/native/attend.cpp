// Attention alone, for models whose other parts are run by other code.
#include "workspace.h"

using namespace everbatch;

namespace {

void widen(const float* x, int64_t n, float* out) { memcpy(out, x, size_t(n) * sizeof(float)); }
void widen(const bf16* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = to_float(x[i]);
}
void narrow(float x, float* out) { *out = x; }
void narrow(float x, bf16* out) { *out = to_bf16(x); }

// Queries [tokens][heads][head_dim], keys and values [tokens][kv heads][head_dim].
template <class T>
struct Given {
    const T *q, *k, *v;
    int64_t heads, kv_heads, d;

    void query(int64_t token, int64_t, int64_t head, float* out) const { widen(q + (token * heads + head) * d, d, out); }
    void key(int64_t token, int64_t, int64_t head, float* out) const { widen(k + (token * kv_heads + head) * d, d, out); }
    void value(int64_t token, int64_t head, float* out) const { widen(v + (token * kv_heads + head) * d, d, out); }
};

template <class T>
void attend(const everbatch_attention& a, const everbatch_batch& b, const void* q, const void* k, const void* v, T* out, AttentionMemory& memory) {
    const int64_t d = a.kv.head_dim;
    const Given<T> given{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), a.heads, a.kv.kv_heads, d};
    BatchAttention<T> attention(b, a.kv, a.heads, memory);
    run_team(b.threads, [&](Team& team) {
        const TilesOfThread tiles;
        attention.run(team, b.pools[0], {a.window, a.sink_tokens}, a.scoring, true, given,
                      [&](int64_t token, int64_t head, const float* acc, float factor) {
                          for (int64_t i = 0; i < d; i++) narrow(acc[i] * factor, out + (token * a.heads + head) * d + i);
                      });
    });
}

}  // namespace

extern "C" {

// Writes k and v [tokens][kv heads][head_dim] of a batch's tokens to the layer's pool, the first of b->pools, and attends with q
// [tokens][heads][head_dim], all of them normed and rotated. out is like q. Of the batch, rows, block tables, pools and threads are read.
// Returns -1. If a row names a block that does not exist, returns its index and writes nothing.
int64_t everbatch_attend(const everbatch_attention* a, const everbatch_batch* b, const void* q, const void* k, const void* v, void* out,
                         everbatch_workspace* w) {
    for (int64_t r = 0; r < b->num_rows; r++)
        if (!has_blocks(b->rows[r], *b, a->kv, b->max_blocks * a->kv.block_size, {a->window, a->sink_tokens})) return r;
    if (a->kv.element_bytes == 4)
        attend(*a, *b, q, k, v, static_cast<float*>(out), w->attention);
    else
        attend(*a, *b, q, k, v, static_cast<bf16*>(out), w->attention);
    return -1;
}

}  // extern "C"
