// What the kernels choose by the machine. No choice changes a bit of a result. kernels/cpu/choices.py makes them, from the instruction set and the
// caches; everbatch_choose sets them when a library is loaded.
#pragma once
#include <cstdint>

namespace everbatch {

struct Choices {
    int32_t vector_rows_of_int8;  // up to so many rows are multiplied by vector instructions where there are tiles, if weights lie in memory as int8;
    int32_t vector_rows_of_bits;  // the same, if weights have fewer bits
    int32_t short_piece;          // rows of a piece of a panel that is unpacked to memory; of two levels twice as many
    int32_t halves_piece;         // rows of a piece of bfloat16
    int32_t long_piece;           // rows of any other piece
    int32_t ahead_of_few;         // bytes between what less than four rows multiply and what they fetch
    int32_t ahead;                // the same for more rows that share one tile
    int32_t fetching_tiles;       // so many tiles of rows share the fetching of the next piece; a power of two of 1 .. 8
};

inline Choices choices = {512, 512, 256, 2048, 2048, 4096, 8192, 2};  // until they are set

}  // namespace everbatch
