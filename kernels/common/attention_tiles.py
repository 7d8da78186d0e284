"""The tiles of context attention: how many rows of queries and how many keys a program works on at a time."""

from __future__ import annotations

from typing import NamedTuple

from kernels.common.kv_format import KVFormat
from kernels.common.triton_runtime import next_power_of_two


class AttentionTiles(NamedTuple):
    block_m: int  # rows of queries: tokens * query heads of a kv head
    block_n: int  # keys
    num_warps: int
    num_stages: int


# (Architecture, whether the pool is quantised or there are sink tokens) -> tiles, for heads of at most 128. On sm_80 each warp
# converts quantised keys for itself and would spill registers with 64 keys, and so would the mask of sink tokens; on sm_90 warps
# share keys, and with 64 a score costs a fifth less than with 32.
TILES = {
    (80, False): AttentionTiles(128, 64, 8, 3),
    (80, True): AttentionTiles(128, 32, 8, 3),
    (90, False): AttentionTiles(128, 128, 8, 2),
    (90, True): AttentionTiles(128, 64, 8, 3),
}
IN_FLOAT32 = AttentionTiles(64, 32, 8, 2)  # tiles for float32 queries; registers do not spill for heads of up to 64
ARCHITECTURES = (80, 90)
MIN_ROWS = 32  # kernels are compiled for at least this many rows, so that small batches share one


def tiles_for(
    head_dim: int,
    is_quantised: bool,
    group: int,
    tokens: int,
    rows: int,
    architecture: int,
    in_float32: bool = False,
    sink_tokens: int = 0,
) -> AttentionTiles:
    """`sink_tokens` of a layer with a window."""
    tiles = IN_FLOAT32 if in_float32 else TILES[architecture, is_quantised or sink_tokens > 0]
    if tokens * group <= 16 * rows:  # few queries a row; BLOCK_N must not change (context_attention.py says why)
        tiles = tiles._replace(block_m=16, num_warps=4)
    if head_dim > 128:
        tiles = tiles._replace(block_m=min(tiles.block_m, 64), block_n=32, num_stages=2)
    return tiles._replace(block_m=max(tiles.block_m, next_power_of_two(group)))


def constants_of(
    tiles: AttentionTiles,
    head_dim: int,
    group: int,
    block_size: int,
    format: KVFormat,
    window: int | None,
    rows: int,
    sink_tokens: int = 0,
) -> dict[str, object]:
    """The kernel's constexpr arguments."""
    made: dict[str, object] = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "WINDOW": window}
    made |= {"SINK_TOKENS": sink_tokens, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    for side, bits in (("KEY", format.key_bits), ("VALUE", format.value_bits)):
        width = head_dim // 2 if bits == 4 else head_dim
        made |= {f"{side}_BITS": bits, f"{side}_D": max(16, next_power_of_two(width))}
    return made | {"ROWS": max(MIN_ROWS, next_power_of_two(rows))}
