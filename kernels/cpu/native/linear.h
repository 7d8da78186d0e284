// A linear layer over packed weights, for any number of rows: out[row][n] = sum over k of a[row][k] * w[n][k] + bias[n].
//
// A thread takes a few panels at a time. For many rows a panel is cut along k into pieces that stay in the first-level cache while
// they are multiplied with all rows; partial sums are kept in scratch memory of the thread. Weights are read from memory once.
#pragma once
#include "buffer.h"
#include "choices.h"
#include "formats.h"
#include "super_blocks.h"
#include "team.h"

namespace everbatch {

struct Linear {
    const void* data;    // [ceil(n / 32)] panels of depth(k) rows
    const bf16* scales;    // [ceil(n / 32)][groups][32]; null for float formats and super-blocks
    const uint8_t* zeros;  // the same, of W4A8 of the kind ZEROS; else null
    const float* bias;     // [ceil(n / 32) * 32]; null without
    int64_t n, k;
    int32_t format, group;  // group: columns of a weight that share a scale: 32 or a multiple of 64; 16 or 32 of super-blocks; 0 of floats

    FourBits kind() const { return zeros ? ZEROS : EVEN; }
    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    int64_t depth() const { return padded_depth(k, group); }
    int64_t groups() const { return group ? depth() / group : 0; }
    bool has_super_blocks() const { return format >= Q4_0; }
    bool multiplies_int8() const { return format == W8A8 || format == ROTATED; }  // as it lies in memory
    bool is_rotated() const { return format == ROTATED; }
    // Columns of the input that share a scale; 0 for inputs that are floats.
    int input_group() const { return multiplies_int8() || has_super_blocks() ? group : format == W4A8 ? PANEL : 0; }
    // Rows of a super-block, or two blocks.
    int64_t rows_of_block() const {
        int64_t rows = 0;
        with_super_blocks(format, [&](auto s) { rows = std::max<int64_t>(64, s.ROWS); });
        return rows;
    }
    // Bytes of `count` packed weights of a panel, where T is the type of float weights. Of super-blocks, and of groups of two
    // levels, it is a whole number.
    template <class T>
    int64_t bytes_of(int64_t count) const {
        int64_t bytes = format == W4A8 ? count / 2 : format >= INT8 ? count : count * int64_t(format == FLOAT16 ? sizeof(fp16) : sizeof(T));
        with_super_blocks(format, [&](auto s) { bytes = count / (s.ROWS * PANEL) * s.BYTES; });
        return bytes;
    }

    static int64_t padded_depth(int64_t k, int64_t group) {
        const int64_t unit = std::max<int64_t>(64, group);
        return (k + unit - 1) / unit * unit;
    }
};

// The input of a linear layer: bfloat16 or float32 [rows][ld], or int8 with scales. Columns k .. depth are zero.
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

constexpr int MAX_ROWS = 512;  // rows of one pass over the weights

// Vector instructions read int8 as it lies in memory and unpack a few bits in registers; tiles need int8 in memory. Without tiles vectors multiply any
// number of rows: unpacking while they multiply is no loss (measured on Zen 4). With tiles it depends on the rows: their set-up, stores and scaling
// take about as long for one as for sixteen. The bits are the same on both sides.
inline bool multiplies_by_vectors([[maybe_unused]] const Linear& l, [[maybe_unused]] int rows) {
#if defined(EVERBATCH_AMX)
    return l.input_group() && rows <= (l.multiplies_int8() ? choices.vector_rows_of_int8 : choices.vector_rows_of_bits);
#else
    return l.input_group();
#endif
}

// Rows of a piece of a panel. A piece fits the first-level cache where the products are that fast (bfloat16 on AMX) or where rows share the work of
// unpacking; otherwise the second-level cache is fast enough.
constexpr int MOST_UNPACKED = 256;  // rows, of bfloat16; of int8 twice as many, for a group of two levels may have them
inline int64_t longest_piece(Format format, bool unpacks) {
    const int64_t unpacked = std::min(MOST_UNPACKED, choices.short_piece);
    return unpacks ? unpacked : format == BFLOAT16 ? choices.halves_piece : choices.long_piece;
}
constexpr int HELD_ROWS = 96;  // rows whose sums of a panel fit the first-level cache until put() takes them

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

// Distance of prefetching in bytes, if one tile has all rows.
inline int64_t fetch_ahead(int rows) { return rows < 4 ? choices.ahead_of_few : choices.ahead; }

// The number of panels in an item of work (at most 4 share a pass over many rows) that makes the threads' shares most even.
inline int64_t panels_together(int64_t panels, int64_t rows, int threads) {
    int64_t best = 1, least = INT64_MAX;
    for (int64_t together = rows <= 32 ? 1 : 4; together >= 1; together--) {
        const int64_t items = (panels + together - 1) / together, longest = (items + threads - 1) / threads * together;
        if (longest < least) best = together, least = longest;
    }
    return best;
}

// The greatest power of two that is at most n.
constexpr int greatest_power(int n) { return n < 2 ? 1 : 2 * greatest_power(n / 2); }

// The product of up to MAX_ROWS rows with some of a layer's panels, panel_at(0 .. panels), AT_ONCE at a time. T is bf16 for BFLOAT16,
// float for FLOAT16, the type that INT8 is unpacked to, and float for the others.
//
// An item of work is a few panels, multiplied piece by piece along k with all tiles of rows. Sums are kept until the last piece; if there
// is only one piece, put() gets them as soon as a few tiles are done.
template <class T, int AT_ONCE, class At, class Put>
class Pass {
public:
    Pass(const Linear& l, const Operand& a, int64_t row0, int rows, int64_t panels, At& panel_at, Put& put, int threads)
        : l_(l), a_(a), row0_(row0), rows_(rows), panels_(panels), panel_at_(panel_at), put_(put) {
        const int64_t unit = l.has_super_blocks() ? l.rows_of_block() : l.multiplies_int8() ? std::max(64, l.group) : 64;
        const int64_t longest = std::max(unit, longest_piece(Format(l.format), unpacks_) / unit * unit);
        const int64_t pieces = (depth_ + longest - 1) / longest;
        piece_ = few_ ? depth_ : (depth_ / pieces + unit - 1) / unit * unit;
        // All panels of an item are multiplied with a piece of the rows while the caches hold it.
        together_ = AT_ONCE * (waits() ? panels_together(panels / AT_ONCE, rows, threads) : 1);
    }

    int64_t items() const { return (panels_ + together_ - 1) / together_; }
    size_t scratch_size() const { return size_t(waits() ? together_ * rows_ : AT_ONCE * held_ * tile_rows_) * PANEL; }

    void run(int64_t item, float* scratch) const {
        alignas(64) T unpacked[AT_ONCE][MOST_UNPACKED * PANEL];
        const int64_t i0 = item * together_, i1 = std::min(panels_, i0 + together_);
        for (int64_t first = 0; first < depth_; first += piece_) {
            const int64_t count = std::min(piece_, depth_ - first);
            for (int64_t i = i0; i < i1; i += AT_ONCE) {
                Part parts[AT_ONCE];
                for (int n = 0; n < AT_ONCE; n++) {
                    // The next read is the same piece of the following panels, the next piece of the first ones, or the next item.
                    const int64_t next = i + AT_ONCE < i1 ? at(panel_at_(i + AT_ONCE + n), first)
                                         : first + piece_ < depth_ ? at(panel_at_(i0 + n), first + piece_)
                                                                   : at(panel_at_(std::min(i1, panels_ - AT_ONCE) + n), 0);
                    parts[n] = part(panel_at_(i + n), first, count, next, unpacked[n]);
                }
                multiply(parts, i, first, count, first + count == depth_, scratch + (waits() ? (i - i0) * rows_ * PANEL : 0));
            }
        }
    }

private:
    struct Part {            // a piece of a panel
        const void* rows;    // as the product reads them
        const void* packed;  // as they are stored
        Scales scales;
        const char* next;
    };

    bool waits() const { return piece_ < depth_; }
    int first_row(int tile) const { return int(int64_t(rows_) * tile / tiles_); }
    int64_t at(int64_t panel, int64_t row) const { return l_.bytes_of<T>((panel * depth_ + row) * PANEL); }

    // Calls f<kind>() for the kind of four bits.
    template <class F>
    void with_kind(F f) const {
        switch (l_.kind()) {
            case EVEN: return f(std::integral_constant<FourBits, EVEN>());
            case ZEROS: return f(std::integral_constant<FourBits, ZEROS>());
        }
    }

    Part part(int64_t panel, int64_t first, int64_t count, int64_t next, T* unpacked) const {
        const char* data = static_cast<const char*>(l_.data);
        const int64_t of_panel = panel * l_.groups() * PANEL;
        const void* packed = data + at(panel, first);
        const Scales scales{l_.scales ? l_.scales + of_panel : nullptr, l_.zeros ? l_.zeros + of_panel : nullptr, uint32_t(l_.group), uint32_t(first)};
        if (few_) next = at(panel, 0) + fetch_ahead(rows_);
        if (!unpacks_) return {packed, packed, scales, data + next};
        int8_t* to = reinterpret_cast<int8_t*>(unpacked);
        if (l_.has_super_blocks())
            with_super_blocks(l_.format, [&](auto s) { unpack_super<decltype(s)>(static_cast<const uint8_t*>(packed), int(count / s.ROWS), to); });
        else if (l_.format == INT8)
            unpack_int8(reinterpret_cast<const int8_t*>(data + at(panel, 0)), scales.scales, l_.group, first, count, unpacked);
        else
            with_kind([&](auto kind) {
                unpack_int4<kind()>(packed, scales, int(count), to);
            });
        return {unpacked, packed, scales, data + next};
    }

    // Multiplies all tiles with a piece of AT_ONCE panels; `sums` are those of these panels.
    void multiply(const Part* parts, int64_t i, int64_t first, int64_t count, bool is_last, float* sums) const {
        for (int t0 = 0; t0 < tiles_; t0 += held_) {
            const int t1 = std::min(tiles_, t0 + held_), r0 = first_row(t0);
            float* of_panel[AT_ONCE];
            for (int n = 0; n < AT_ONCE; n++) {
                of_panel[n] = sums + (waits() ? n * rows_ + r0 : n * held_ * tile_rows_) * PANEL;
                for (int t = t0; t < t1; t++) product_of(t, parts[n], first, count, of_panel[n] + (first_row(t) - r0) * PANEL);
            }
            if (is_last) hand_over(i, r0, first_row(t1), of_panel);
        }
    }

    // c (+)= a tile of rows times rows first .. first + count of a panel. The first tiles prefetch the next read.
    void product_of(int tile, const Part& part, int64_t first, int64_t count, float* c) const {
#if defined(EVERBATCH_AMX)
        if (by_tiles_) return product_by_tiles(tile, part, first, count, c);
#endif
        const bool in_half = tiles_ > 1 && !unpacks_;  // two tiles share the prefetching; unpacked rows have twice the bytes
        const char* next = part.next + (in_half ? tile * l_.bytes_of<T>(count * PANEL) / 2 : 0);
        if (tiles_ == 1 && !unpacks_)
            product_by_vectors(std::integral_constant<int, 2>(), tile, part, first, count, c, next);
        else if (tile == 0 || (tile == 1 && in_half))
            product_by_vectors(std::integral_constant<int, 1>(), tile, part, first, count, c, next);
        else
            product_by_vectors(std::integral_constant<int, 0>(), tile, part, first, count, c, next);
    }

    // LINES: as `prefetch` has it.
    template <class Lines>
    void product_by_vectors(Lines lines, int tile, const Part& part, int64_t first, int64_t count, float* c, const char* next) const {
        const int64_t row = row0_ + first_row(tile);
        const int n = first_row(tile + 1) - first_row(tile);
        if (!input_group_) return of_floats(lines, a_.row<T>(row) + first, part.rows, int(count), c, n, next, first == 0);
        const Int8Rows x = a_.int8(row, first, first / input_group_);
        const int groups = int(count / input_group_);
        const uint8_t* packed = static_cast<const uint8_t*>(part.packed);
        auto of_int8 = [&](auto weights) {
            product_int8<lines()>(x, weights, part.scales, input_group_, groups, c, PANEL, first == 0, n, next);
        };
        if (l_.has_super_blocks())
            with_super_blocks(l_.format, [&](auto s) {
                product_super<decltype(s)>(x, packed, int(count / s.ROWS), c, PANEL, first == 0, n, next, lines());
            });
        else if (l_.format == W4A8)
            with_kind([&](auto kind) { of_int8(Int4Panel<kind()>(packed)); });
        else
            of_int8(Int8Panel{static_cast<const int8_t*>(part.packed)});
    }

#if defined(EVERBATCH_AMX)
    void product_by_tiles(int tile, const Part& part, int64_t first, int64_t count, float* c) const {
        const int64_t row = row0_ + first_row(tile);
        const int n = first_row(tile + 1) - first_row(tile), lines = few_ ? ALL_LINES : tile < fetching_tiles_ ? lines_of_tile() : 0;
        const char* next = part.next + (few_ ? 0 : tile * (l_.bytes_of<T>(count * PANEL) / fetching_tiles_));
        if constexpr (sizeof(T) == 2)
            if (!input_group_) return product_amx(a_.row<T>(row) + first, a_.ld, static_cast<const T*>(part.rows), int(count), c, PANEL, first == 0, n, next, lines);
        const auto of_int8 = [&](auto scaling, int group) {
            product_int8_amx(a_.int8(row, first, first / input_group_), static_cast<const int8_t*>(part.rows), scaling, group, int(count / group), c, PANEL,
                             first == 0, n, next, lines);
        };
        if (!l_.has_super_blocks()) return of_int8(TableScaling{part.scales, input_group_}, input_group_);
        with_super_blocks(l_.format, [&](auto s) { of_int8(SuperScaling<decltype(s)>{static_cast<const uint8_t*>(part.packed)}, s.GROUP); });
    }
    // Of 2 KB of a panel as it is multiplied, which takes half the bytes where it is packed.
    int lines_of_tile() const { return (unpacks_ ? ALL_LINES / 2 : ALL_LINES) / fetching_tiles_; }
#endif

    template <class Lines>
    void of_floats(Lines lines, const T* a, const void* rows, int count, float* c, int n, const char* next, bool first) const {
        if constexpr (sizeof(T) == 4)
            if (l_.format == FLOAT16) return product<lines()>(a, a_.ld, static_cast<const fp16*>(rows), count, c, PANEL, first, n, next);
        product<lines()>(a, a_.ld, static_cast<const T*>(rows), count, c, PANEL, first, n, next);
    }

    void hand_over(int64_t i, int r0, int r1, float** sums) const {
        for (int r = r0; r < r1; r++) {
            for (int n = 0; n < AT_ONCE; n++) {
                if (r > r0) sums[n] += PANEL;
                if (l_.bias)
                    for (int j = 0; j < PANEL; j += LANES)
                        store(sums[n] + j, load<Vec>(sums[n] + j) + load<Vec>(l_.bias + panel_at_(i + n) * PANEL + j));
            }
            if constexpr (AT_ONCE == 1)
                put_(row0_ + r, panel_at_(i) * PANEL, sums[0]);
            else
                put_(row0_ + r, panel_at_(i) * PANEL, sums[0], sums[1]);
        }
    }

    const Linear& l_;
    const Operand& a_;
    const int64_t row0_;
    const int rows_;
    const int64_t panels_;
    At& panel_at_;
    Put& put_;
    const bool by_vectors_ = multiplies_by_vectors(l_, rows_);
    const bool unpacks_ = (l_.format == INT8 || l_.format == W4A8 || l_.has_super_blocks()) && !by_vectors_;  // to memory
    const int64_t depth_ = l_.depth();
    const int input_group_ = l_.input_group();
    const int tile_rows_ = by_vectors_ ? W8A8_ROWS : input_group_ ? TILE_ROWS : rows_at_once<T>(), tiles_ = (rows_ + tile_rows_ - 1) / tile_rows_;
    const int held_ = std::max(1, HELD_ROWS / tile_rows_);  // tiles
    const bool few_ = tiles_ == 1 && !unpacks_;
#if defined(EVERBATCH_AMX)
    const bool by_tiles_ = input_group_ ? !by_vectors_ : sizeof(T) == 2;
    const int fetching_tiles_ = greatest_power(std::min(tiles_, choices.fetching_tiles));
#endif
    int64_t piece_, together_;
};

// put(row, column, sums...) gets the 32 sums of one row, with bias, of each of AT_ONCE panels. `column` is that of the first panel's first
// sum; columns from l.n on are padding.
template <class T, int AT_ONCE, class At, class Put>
void in_order(Team& team, const Linear& l, const Operand& a, int64_t rows, int64_t panels, At panel_at, Put put) {
    static thread_local Buffer<float> scratch;
    for (int64_t row0 = 0; row0 < rows; row0 += MAX_ROWS) {
        const int count = int(std::min<int64_t>(MAX_ROWS, rows - row0));
        const Pass<T, AT_ONCE, At, Put> pass(l, a, row0, count, panels, panel_at, put, team.size);
        scratch.grow(pass.scratch_size());
        team.for_each(pass.items(), [&](int64_t item) { pass.run(item, scratch.data()); });
    }
}

template <class T, class Put>
void linear(Team& team, const Linear& l, const Operand& a, int64_t rows, Put put) {
    in_order<T, 1>(team, l, a, rows, l.panels(), [](int64_t i) { return i; }, put);
}

// The same for a layer of few panels: threads share the rows, if there are many.
template <class T, class Put>
void linear_by_rows(Team& team, const Linear& l, const Operand& a, int64_t rows, Put put) {
    constexpr int64_t TOGETHER = 32;
    if (rows <= TOGETHER) return linear<T>(team, l, a, rows, put);
    static thread_local Buffer<float> scratch;
    auto panel_at = [](int64_t i) { return i; };
    team.for_each((rows + TOGETHER - 1) / TOGETHER, [&](int64_t block) {
        const int64_t row0 = block * TOGETHER;
        const Pass<T, 1, decltype(panel_at), Put> pass(l, a, row0, int(std::min(TOGETHER, rows - row0)), l.panels(), panel_at, put, 1);
        scratch.grow(pass.scratch_size());
        for (int64_t item = 0; item < pass.items(); item++) pass.run(item, scratch.data());
    });
}

// The product with a layer whose outputs are two halves of whole panels: put(row, column, sums of the first half, of the second).
template <class T, class Put>
void linear_of_halves(Team& team, const Linear& l, const Operand& a, int64_t rows, Put put) {
    const int64_t panels = l.panels(), half = panels / 2;
    in_order<T, 2>(team, l, a, rows, panels, [half](int64_t i) { return i / 2 + i % 2 * half; }, put);
}

}  // namespace everbatch
