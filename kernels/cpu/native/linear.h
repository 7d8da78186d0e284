// A linear layer over packed weights, for any number of rows: out[row][n] = sum over k of a[row][k] * w[n][k] + bias[n].
//
// A thread takes a few panels at a time. For many rows a panel is cut along k, so that the piece stays in the innermost cache
// while all rows pass it; the sums wait in a scratch of the thread. Weights are read from memory once.
#pragma once
#include "buffer.h"
#include "team.h"
#include "tiles.h"

namespace everbatch {

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, W8A8 = 3 };

struct Linear {
    const void* data;    // [ceil(n / 32)] panels of depth(k) rows
    const bf16* scales;  // [ceil(n / 32)][groups][32]; null for float formats
    const float* bias;   // [ceil(n / 32) * 32]; null without
    int64_t n, k;
    int32_t format, group;  // group: columns of the input that share a scale: 32 or a multiple of 64; 0 for float formats

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    int64_t depth() const { return padded_depth(k, group); }
    int64_t groups() const { return group ? depth() / group : 0; }

    static int64_t padded_depth(int64_t k, int64_t group) {
        const int64_t unit = std::max<int64_t>(64, group);
        return (k + unit - 1) / unit * unit;
    }
};

// Rows as a linear layer reads them: bfloat16 or float32 [rows][ld], or int8 with scales. Columns k .. depth are zero.
struct Operand {
    const void* data = nullptr;
    size_t ld = 0;  // elements
    const float* scales = nullptr;
    const int32_t* sums = nullptr;
    size_t groups = 0;

    template <class T>
    const T* row(int64_t r) const {
        return static_cast<const T*>(data) + r * ld;
    }
    Int8Rows int8(int64_t r, int64_t first_column, int64_t first_group) const {
        return {row<int8_t>(r) + first_column, ld, scales + r * groups + first_group, sums + r * groups + first_group, groups};
    }
};

// Rows of a panel that are used on all rows of the batch before the next ones: as many as the innermost cache keeps, where the
// products are fast enough (AMX) or the work of unpacking is to be shared; else the second cache's speed will do.
constexpr int SHORT_PIECE = 256;
#if defined(EVERBATCH_AMX)
constexpr int PIECE = SHORT_PIECE;
#else
constexpr int PIECE = 2048;
#endif
constexpr int MOST_ROWS = 512;  // rows of one pass over the weights
constexpr int HELD_ROWS = 96;   // whose sums of a panel the innermost cache keeps until they are handed over

// int8 weights of one panel -> a packed panel of T. k rows, a multiple of 64; `w` and `scales` are those of the whole panel.
template <class T>
void unpack_int8(const int8_t* w, const bf16* scales, int group, int64_t first, int64_t count, T* out) {
    for (int64_t i = first; i < first + count; i += 4) {
        const bf16* scale = scales + i / group * PANEL;
        for (int j = 0; j < COLUMN_VECS; j++) {
            IVec q = load<IVec>(w + packed_at<4>(i, j * LANES));
            if (WEIGHT_BIAS) q ^= int32_t(0x80808080);
            Vec s = load_bf16(scale + j * LANES), v[4];
#pragma GCC unroll 4
            for (int b = 0; b < 4; b++) v[b] = __builtin_convertvector((q << (24 - 8 * b)) >> 24, Vec) * s;
            const int64_t row = i - first;
            if constexpr (sizeof(T) == 4) {
                for (int b = 0; b < 4; b++) store(out + (row + b) * PANEL + j * LANES, v[b]);
            } else {
                for (int b = 0; b < 4; b += 2) {
                    store_bf16_pairs(out + packed_at<2>(row + b, j * LANES), v[b], v[b + 1]);
                }
            }
        }
    }
}

// Bytes between what is used of a panel and what is fetched, where one tile has all rows: measured on Zen 4.
constexpr int64_t fetch_ahead(int rows) { return rows < 4 ? 4096 : 8192; }

// Panels that an item of work takes, so that the threads' shares are even: 4 share a pass over many rows of activations.
inline int64_t panels_together(int64_t panels, int64_t rows, int threads) {
    int64_t best = 1, least = INT64_MAX;
    for (int64_t together = rows <= 32 ? 1 : 4; together >= 1; together--) {
        const int64_t items = (panels + together - 1) / together, longest = (items + threads - 1) / threads * together;
        if (longest < least) best = together, least = longest;
    }
    return best;
}

// Rows of `a`, in tiles: what one product takes.
template <class T>
struct Tiles {
    const Linear& l;
    const Operand& a;
    const int64_t row0;
    const int rows, most = l.format == W8A8 ? INT8_ROWS : rows_at_once<T>(), count = (rows + most - 1) / most;

    int first(int tile) const { return int(int64_t(rows) * tile / count); }

    // c [first(tile + 1) - first(tile)][PANEL] (+)= a tile times rows from .. from + depth of a panel. `panel`: of T, these rows alone, or
    // of W8A8, from its beginning on. `next`: what is read next; the first tiles fetch it.
    void multiply(int tile, const void* panel, const bf16* scales, int64_t from, int64_t depth, float* c, const char* next) const {
        const int64_t row = row0 + first(tile);
        const int n = first(tile + 1) - first(tile);
        const bool in_half = count > 1 && l.format != INT8;  // two tiles share the fetching; unpacked rows are twice what is read
        if (in_half) next += tile * depth * PANEL * (l.format == W8A8 ? 1 : sizeof(T)) / 2;
        auto run = [&](auto lines) {
            if (l.format == W8A8)
                product_int8<lines()>(a.int8(row, from, from / l.group), static_cast<const int8_t*>(panel) + from * PANEL,
                                      scales + from / l.group * PANEL, l.group, int(depth / l.group), c, PANEL, from == 0, n, next);
            else
                product<lines()>(a.row<T>(row) + from, a.ld, static_cast<const T*>(panel), int(depth), c, PANEL, from == 0, n, next);
        };
        if (count == 1 && l.format != INT8)
            run(std::integral_constant<int, 2>());
        else if (tile == 0 || (tile == 1 && in_half))
            run(std::integral_constant<int, 1>());
        else
            run(std::integral_constant<int, 0>());
    }
};

// The product with some of a layer's panels: panel_at(0 .. panels), in this order, AT_ONCE together.
// put(row, column, sums...): hands over 32 sums of one row and panel, bias added, of AT_ONCE panels, with the first one's column; columns
// from l.n on are padding. T: bf16 for BFLOAT16; what INT8 is unpacked to; float for the others.
template <class T, int AT_ONCE, class At, class Put>
void in_order(Team& team, const Linear& l, const Operand& a, int64_t rows, int64_t panels, At panel_at, Put put) {
    static thread_local Buffer<float> scratch;
    const int64_t depth = l.depth(), bytes = l.format >= INT8 ? 1 : sizeof(T);
    const bool unpacks = l.format == INT8;
    const char* data = static_cast<const char*>(l.data);
    for (int64_t row0 = 0; row0 < rows; row0 += MOST_ROWS) {
        const int m = int(std::min<int64_t>(MOST_ROWS, rows - row0));
        const Tiles<T> tiles{l, a, row0, m};
        const bool few = tiles.count == 1 && !unpacks;
        const int64_t unit = l.format == W8A8 ? std::max(64, l.group) : 64, longest = unpacks ? SHORT_PIECE : PIECE;
        const int64_t pieces = (depth + longest - 1) / longest;
        const int64_t piece = few ? depth : (depth / pieces + unit - 1) / unit * unit;
        // Sums wait here for the next piece, of which all panels of an item are multiplied while the innermost caches have those rows;
        // where there is only one, they are handed over as soon as a few tiles are done.
        const bool waits = piece < depth;
        const int64_t together = AT_ONCE * (waits ? panels_together(panels / AT_ONCE, m, team.size) : 1);
        const int held = std::max(1, HELD_ROWS / tiles.most);
        scratch.grow(size_t(waits ? together * m : AT_ONCE * held * tiles.most) * PANEL);
        const int64_t items = (panels + together - 1) / together;
        team.for_each(items, [&](int64_t item) {
            alignas(64) T unpacked[AT_ONCE][SHORT_PIECE * PANEL];
            const int64_t i0 = item * together, i1 = std::min(panels, i0 + together);
            for (int64_t first = 0; first < depth; first += piece) {
                const int64_t count = std::min(piece, depth - first);
                const bool is_last = first + piece >= depth;
                for (int64_t i = i0; i < i1; i += AT_ONCE) {
                    const void* panel[AT_ONCE];
                    const bf16* scales[AT_ONCE];
                    const char* next[AT_ONCE];
                    for (int n = 0; n < AT_ONCE; n++) {
                        const int64_t p = panel_at(i + n);
                        panel[n] = data + (p * depth + (l.format == W8A8 ? 0 : first)) * PANEL * bytes;
                        scales[n] = l.scales + p * l.groups() * PANEL;
                        next[n] = data + PANEL * bytes * (i + AT_ONCE < i1 ? panel_at(i + AT_ONCE + n) * depth + first
                                                          : is_last        ? panel_at(std::min(i1, panels - AT_ONCE) + n) * depth
                                                                           : panel_at(i0 + n) * depth + first + piece);
                        if (few) next[n] = data + p * depth * PANEL * bytes + fetch_ahead(m);
                        if (unpacks) {
                            unpack_int8(static_cast<const int8_t*>(l.data) + p * depth * PANEL, scales[n], l.group, first, count, unpacked[n]);
                            panel[n] = unpacked[n];
                        }
                    }
                    for (int t0 = 0; t0 < tiles.count; t0 += held) {
                        const int t1 = std::min(tiles.count, t0 + held), r0 = tiles.first(t0), r1 = tiles.first(t1);
                        float* sums[AT_ONCE];
                        for (int n = 0; n < AT_ONCE; n++) {
                            sums[n] = scratch.data() + (waits ? (i - i0 + n) * m + r0 : n * held * tiles.most) * PANEL;
                            for (int t = t0; t < t1; t++)
                                tiles.multiply(t, panel[n], scales[n], first, count, sums[n] + (tiles.first(t) - r0) * PANEL, next[n]);
                        }
                        if (!is_last) continue;
                        for (int r = r0; r < r1; r++) {
                            for (int n = 0; n < AT_ONCE; n++) {
                                if (r > r0) sums[n] += PANEL;
                                if (l.bias)
                                    for (int j = 0; j < PANEL; j += LANES)
                                        store(sums[n] + j, load<Vec>(sums[n] + j) + load<Vec>(l.bias + panel_at(i + n) * PANEL + j));
                            }
                            if constexpr (AT_ONCE == 1)
                                put(row0 + r, panel_at(i) * PANEL, sums[0]);
                            else
                                put(row0 + r, panel_at(i) * PANEL, sums[0], sums[1]);
                        }
                    }
                }
            }
        });
    }
}

template <class T, class Put>
void linear(Team& team, const Linear& l, const Operand& a, int64_t rows, Put put) {
    in_order<T, 1>(team, l, a, rows, l.panels(), [](int64_t i) { return i; }, put);
}

// Of a layer whose outputs are two halves of whole panels: put(row, column, sums of the first half, sums of the second).
template <class T, class Put>
void linear_of_halves(Team& team, const Linear& l, const Operand& a, int64_t rows, Put put) {
    const int64_t panels = l.panels(), half = panels / 2;
    in_order<T, 2>(team, l, a, rows, panels, [half](int64_t i) { return i / 2 + i % 2 * half; }, put);
}

}  // namespace everbatch
