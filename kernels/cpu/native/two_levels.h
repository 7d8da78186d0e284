// Weights of four bits that stand for int8 (TWO_LEVELS), with scales of two levels and rotated inputs (rotation.h):
//
//     w = LEVELS[m][q] * scale      q 0 .. 15; m -63 .. 63, of 32 rows of a column; scale of a group of 64 to 512 rows of a column
//     LEVELS[m][q] = (m * VALUES[q] + 64) >> 7, of -63 .. 63
//
// The multiple m says how large the numbers of its rows are beside those of the group. Both are applied while weights are unpacked, so that
// products are sums of integers over the whole group (progressive quantisation: QServe, Lin et al., 2024). Tiles get them as int8, to which a piece
// of a panel is unpacked once for all rows; vector instructions unpack them in registers. Either way the sum of a group is the same
// integer, and so the result is the same, bit for bit. kernels/common/two_levels.py rounds weights so.
//
// 16 rows of a column are 16 bytes of a vector, so that one look-up in the levels of their multiples unpacks them. A vector has LANES / 4 columns, four
// vectors are a block of LANES columns, and vector i holds columns i, 4 + i, 8 + i, ...: sums of the four, transposed and added, are in order.
// A panel consists of its groups: multiples [chunks of 32 rows][columns in that order], then blocks [chunks][4 vectors][columns][16 bytes], whose low
// bits are the first 16 rows of a chunk and whose high bits are the others.
#pragma once
#include <utility>

#include "tiles.h"

namespace everbatch {

constexpr int CHUNK = 32, MOST_MULTIPLE = 63, LEVEL_ZERO = 64;  // rows that share a multiple; what is added to levels, so that none is negative
constexpr int BLOCK_VECS = 4, COLUMNS_OF_VEC = LANES / 4, BLOCKS = PANEL / LANES;
constexpr int64_t bytes_of_levels(int64_t rows) { return rows / CHUNK * PANEL * (1 + CHUNK / 2); }  // of a panel

#if defined(__AVX512F__)
constexpr int LEVEL_ROWS = 6;  // rows whose sums of a block are in registers
#elif defined(__AVX2__)
constexpr int LEVEL_ROWS = 2;
#else
constexpr int LEVEL_ROWS = 1;
#endif

// The place of a column, and of its multiple, among those of a chunk.
constexpr int place_of(int column) {
    const int in_block = column % LANES;
    return column / LANES * LANES + in_block % BLOCK_VECS * COLUMNS_OF_VEC + in_block / BLOCK_VECS;
}

struct LevelTables {
    static constexpr int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    alignas(64) uint8_t of[2 * MOST_MULTIPLE + 1][16] = {};  // LEVELS[m][q] + LEVEL_ZERO

    constexpr LevelTables() {
        for (int m = -MOST_MULTIPLE; m <= MOST_MULTIPLE; m++)
            for (int q = 0; q < 16; q++) of[m + MOST_MULTIPLE][q] = uint8_t(((m * VALUES[q] + 64) >> 7) + LEVEL_ZERO);
    }
    const uint8_t* at(int8_t m) const { return of[m + MOST_MULTIPLE]; }
};
inline constexpr LevelTables LEVELS{};

// 32 rows of COLUMNS_OF_VEC columns.
struct Levels {
    Bytes first, last;  // 16 rows each

    ALWAYS_INLINE Levels(const int8_t* multiples, const uint8_t* bits) {
        const Bytes table = joined([multiples](int c) { return LEVELS.at(multiples[c]); });
        const UVec q = load<UVec>(bits);
        first = look_up_each(table, (Bytes)q), last = look_up_each(table, (Bytes)(q >> 4));
    }
};

// In each 16 bytes, the numbers P0 .. P3 of those of a (0 .. 3) and of b (4 .. 7).
template <int P0, int P1, int P2, int P3, int... I>
ALWAYS_INLINE IVec picked(IVec a, IVec b, std::integer_sequence<int, I...>) {
    constexpr int from[4] = {P0, P1, P2, P3};
    return IVec{(from[I % 4] < 4 ? a : b)[I / 4 * 4 + from[I % 4] % 4]...};
}
template <int P0, int P1, int P2, int P3>
ALWAYS_INLINE IVec picked(IVec a, IVec b) {
    return picked<P0, P1, P2, P3>(a, b, std::make_integer_sequence<int, LANES>());
}

// Numbers 0 .. 3 of each 16 bytes of v[i] become number i of out[0 .. 3]: a block's vectors of four numbers of a column -> four of all its columns.
ALWAYS_INLINE void transpose(const IVec (&v)[BLOCK_VECS], IVec (&out)[BLOCK_VECS]) {
    const IVec a = picked<0, 4, 1, 5>(v[0], v[1]), b = picked<2, 6, 3, 7>(v[0], v[1]);
    const IVec c = picked<0, 4, 1, 5>(v[2], v[3]), d = picked<2, 6, 3, 7>(v[2], v[3]);
    out[0] = picked<0, 1, 4, 5>(a, c), out[1] = picked<2, 3, 6, 7>(a, c);
    out[2] = picked<0, 1, 4, 5>(b, d), out[3] = picked<2, 3, 6, 7>(b, d);
}

// sums[row] (+)= the products of a block: `x` of a group's first column, `multiples` and `bits` of the group's first chunk.
template <int ROWS>
ALWAYS_INLINE void add_block(IVec (&sums)[ROWS][BLOCK_VECS], const int8_t* x, size_t ld, const int8_t* multiples, const uint8_t* bits, int chunks,
                             const char*& ahead, int lines) {
    for (int chunk = 0; chunk < chunks; chunk++, multiples += PANEL, x += CHUNK) {
        for (int n = 0; n < lines * LANES / 8; n++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_VECS; i++, bits += sizeof(Bytes)) {
            const Levels levels(multiples + i * COLUMNS_OF_VEC, bits);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                sums[r][i] = dot_bytes(sums[r][i], levels.first, repeated(x + r * ld));
                sums[r][i] = dot_bytes(sums[r][i], levels.last, repeated(x + r * ld + 16));
            }
        }
    }
}

// c (+)= activations times `num_groups` groups of a panel. Of every 128 bytes that are read, `lines` cache lines ahead are fetched.
template <int ROWS>
__attribute__((noinline)) void product_levels_rows(Int8Rows a, const uint8_t* w, Scales scales, int group, int num_groups, float* c, size_t ldc,
                                                   bool first, const char* ahead, int lines) {
    const int chunks = group / CHUNK;
    for (int g = 0; g < num_groups; g++, w += bytes_of_levels(group)) {
        for (int at = 0; at < group * lines / 2; at += 64, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        for (int block = 0; block < BLOCKS; block++) {
            const int64_t column = block * LANES;
            IVec sums[ROWS][BLOCK_VECS] = {};
            add_block<ROWS>(sums, a.data + g * group, a.ld, reinterpret_cast<const int8_t*>(w + column), w + (PANEL + column * CHUNK / 2) * chunks,
                            chunks, ahead, lines);
            const Vec ws = load_bf16(scales.at(g * group) + column);
            for (int r = 0; r < ROWS; r++) {
                IVec of_columns[BLOCK_VECS];
                transpose(sums[r], of_columns);
                const IVec whole = splat(a.sums[r * a.groups + size_t(g)]) + of_columns[0] + of_columns[1] + of_columns[2] + of_columns[3];
                float* at = c + r * ldc + column;
                const Vec before = first && g == 0 ? Vec{} : load<Vec>(at);
                store(at, fma(__builtin_convertvector(whole, Vec), ws * splat(a.scales[r * a.groups + size_t(g)]), before));
            }
        }
    }
}

inline void product_levels(const Int8Rows& a, const uint8_t* w, const Scales& scales, int group, int num_groups, float* c, size_t ldc, bool first,
                           int rows, const char* ahead, int lines) {
    with_rows<LEVEL_ROWS>(rows, [&](auto n) { product_levels_rows<n()>(a, w, scales, group, num_groups, c, ldc, first, ahead, lines); });
}

// `count` rows of a panel, which are whole groups -> a packed panel of int8.
inline void unpack_levels(const uint8_t* w, int64_t group, int64_t count, int8_t* out) {
    const int64_t chunks = group / CHUNK;
    for (int64_t first = 0; first < count; first += group, w += bytes_of_levels(group)) {
        const uint8_t* bits = w + chunks * PANEL;
        for (int64_t column = 0; column < PANEL; column += LANES)
            for (int64_t row = first; row < first + group; row += CHUNK) {
                const int8_t* multiples = reinterpret_cast<const int8_t*>(w) + (row - first) / CHUNK * PANEL + column;
                IVec of_rows[2][BLOCK_VECS], of_columns[BLOCK_VECS];
                for (int i = 0; i < BLOCK_VECS; i++, bits += sizeof(Bytes)) {
                    const Levels levels(multiples + i * COLUMNS_OF_VEC, bits);
                    of_rows[0][i] = (IVec)levels.first, of_rows[1][i] = (IVec)levels.last;
                }
                for (int half = 0; half < 2; half++) {
                    transpose(of_rows[half], of_columns);
                    for (int quad = 0; quad < 4; quad++)
                        store(out + packed_at<4>(row + 16 * half + 4 * quad, column), (Bytes)of_columns[quad] + uint8_t(WEIGHT_BIAS - LEVEL_ZERO));
                }
            }
    }
}

// Finds the multiples and q of int8 weights.
class LevelFinder {
public:
    LevelFinder() {
        for (int m = 0; m < NUM_MULTIPLES; m++)
            for (int q = 0; q < 16; q++) {
                const uint8_t level = LEVELS.of[m][q];
                levels_[m][level / 64] |= uint64_t(1) << level % 64;
                places_[m][level] = uint8_t(q);
            }
    }
    // Packs `column` of a panel, whose memory is all zero: w [k]. Returns the number of chunks that are no levels of one multiple; they stay zero.
    int64_t pack(const int8_t* w, int64_t k, int64_t group, int column, uint8_t* panel) const {
        int64_t others = 0;
        const int place = place_of(column);
        for (int64_t row = 0; row < k; row += CHUNK) {
            const int64_t chunk = row % group / CHUNK, chunks = group / CHUNK;
            uint8_t* of_group = panel + bytes_of_levels(row / group * group);
            uint8_t* bits = of_group + chunks * PANEL + (place / LANES * chunks + chunk) * LANES * (CHUNK / 2) + place % LANES * (CHUNK / 2);
            const int m = multiple_of(w + row);
            if (m < 0) {
                others++;
                continue;
            }
            of_group[chunk * PANEL + place] = uint8_t(m - MOST_MULTIPLE);
            for (int i = 0; i < CHUNK / 2; i++) bits[i] = uint8_t(place_in(m, w[row + i]) | place_in(m, w[row + CHUNK / 2 + i]) << 4);
        }
        return others;
    }

private:
    static constexpr int NUM_MULTIPLES = 2 * MOST_MULTIPLE + 1;

    uint8_t place_in(int m, int8_t w) const { return places_[m][w + LEVEL_ZERO]; }
    // The first multiple, counted from -MOST_MULTIPLE on, whose levels hold CHUNK weights; -1 if there is none.
    int multiple_of(const int8_t* w) const {
        uint64_t wanted[2] = {};
        for (int i = 0; i < CHUNK; i++) {
            const int level = w[i] + LEVEL_ZERO;
            if (level < 0 || level >= 128) return -1;
            wanted[level / 64] |= uint64_t(1) << level % 64;
        }
        for (int m = 0; m < NUM_MULTIPLES; m++)
            if (!(wanted[0] & ~levels_[m][0]) && !(wanted[1] & ~levels_[m][1])) return m;
        return -1;
    }

    uint64_t levels_[NUM_MULTIPLES][2] = {};  // a bit for each level
    uint8_t places_[NUM_MULTIPLES][128] = {};
};

}  // namespace everbatch
