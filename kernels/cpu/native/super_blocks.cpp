// The products of super_blocks.h, of each format.
#include "super_blocks.h"

namespace everbatch {

template <class S, int ROWS>
__attribute__((noinline)) void product_super_rows(Int8Rows a, const uint8_t* w, int count, float* c, size_t ldc, bool first, const char* ahead,
                                                  int lines) {
    Sums<ROWS> sums(c, ldc, first);
    const int64_t fetched = S::BYTES / S::CHUNKS * lines / 2;
    Bytes values{};
    if (S::VALUES && !S::HAS_HEADER) values = S::values(w);
    for (int g = 0; count > 0; count--, w += S::BYTES) {
        Vec d[COLUMN_VECS], e[COLUMN_VECS];
        if (S::HAS_HEADER) values = S::values(w);
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) {
            d[j] = S::of_block(w, 0, 0, j);
            if (S::MINIMA) e[j] = S::of_block(w, 1, 0, j);
        }
        const uint8_t* bits = w + S::HEAD;
        for (int chunk = 0; chunk < S::CHUNKS; chunk++, bits += S::CHUNK, ahead += fetched) {
            for (int64_t i = 0; i < fetched; i += 64) __builtin_prefetch(ahead + i, 0, 2);
#pragma GCC unroll 2
            for (int of_chunk = 0; of_chunk < S::GROUPS_OF_CHUNK; of_chunk++, g++, a.data += S::GROUP) {
                IVec whole[ROWS][COLUMN_VECS];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) whole[r][j] = S::start(a.sums[r * a.groups + g]);
#pragma GCC unroll 8
                for (int quad = 0; quad < S::QUADS; quad++) {
                    IVec wv[COLUMN_VECS];
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) wv[j] = S::read(bits, of_chunk * S::QUADS + quad, j, values);
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                        for (int j = 0; j < COLUMN_VECS; j++) whole[r][j] = S::dot(whole[r][j], wv[j], a.data + r * a.ld + 4 * quad);
                }
                Vec ws[COLUMN_VECS], wm[COLUMN_VECS];
#pragma GCC unroll 8
                for (int j = 0; j < COLUMN_VECS; j++) {
                    if (!S::IS_SUPER && of_chunk > 0) {
                        d[j] = S::of_block(w, 0, of_chunk, j);
                        if (S::MINIMA) e[j] = S::of_block(w, 1, of_chunk, j);
                    }
                    ws[j] = S::scale(d[j], w, chunk * S::GROUPS_OF_CHUNK + of_chunk, j);
                    if (S::MINIMA) wm[j] = S::minimum(e[j], w, chunk * S::GROUPS_OF_CHUNK + of_chunk, j);
                }
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const float scale = a.scales[r * a.groups + g];
                    const Vec rs = splat(scale), minus_sum = splat(scale * float(a.sums[r * a.groups + g]));
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) {
                        sums.v[r][j] = fma(__builtin_convertvector(whole[r][j], Vec), ws[j] * rs, sums.v[r][j]);
                        if (S::MINIMA) sums.v[r][j] = fma(wm[j], minus_sum, sums.v[r][j]);
                    }
                }
            }
        }
    }
    sums.put(c, ldc);
}

template <class S>
void product_super(Int8Rows a, const uint8_t* w, int count, float* c, size_t ldc, bool first, int rows, const char* ahead, int lines) {
    with_rows<W8A8_ROWS>(rows, [&](auto n) { product_super_rows<S, n()>(a, w, count, c, ldc, first, ahead, lines); });
}

#define EVERBATCH_INSTANTIATE(name, ...) \
    template void product_super<SuperBlocks<__VA_ARGS__>>(Int8Rows, const uint8_t*, int, float*, size_t, bool, int, const char*, int);
EVERBATCH_SUPER_BLOCKS(EVERBATCH_INSTANTIATE)

}  // namespace everbatch
