"""The formats of keys and values, each plain, int8 or int4, and the layout of a layer's pool on the triton and torch tiers.

For each token and kv head, its key (after RoPE and the rotation of kv_rotation.py) and its value are each quantised as a row, in
float32. What a row becomes depends on the tier that runs the model:

             native (kernels/cpu)                  triton and torch
    int8     symmetric, one float32 scale          asymmetric, scale and least
    int4     asymmetric, scale and least           the same

Both take four bytes beside the numbers, so a pool is as large on every tier. The native int8 has at least twice the step for a
row whose values all have one sign, and the same for a row around zero; in return a product reads plain integers, and nothing is
added for an offset. So replies with int8 KV are not the same, bit for bit, on the native kernels as on a GPU or on torch
operators. On each tier a row's numbers depend on that row alone.

Symmetric (quantize_group of kernels/cpu/native/rows.h), q as int8:

    scale = max(|x|) / 127
    q     = round(x / scale), ties to even              0 where the scale is 0
    x     ~ q * scale

Asymmetric is TurboMind's form; QServe (Lin et al. 2024) stores -least / scale instead, which overflows float16 if a row is
nearly constant:

    least = float16(clamp(min, -65504, 65504))
    scale = float16(clamp((max - least) / (2^bits - 1), 0, 65504))
    q     = clamp(floor((x - least) / scale + 0.5), 0, 2^bits - 1)        0 where the scale is 0
    x     ~ q * scale + least

65504 is float16's largest number, so scale and least are finite whatever the row holds. Values below -65504, or more than
65504 * (2^bits - 1) above least, are clipped. Otherwise the error is at most scale / 2 + |least| / 2048 + 2^-17; the last two
terms matter only in rows that are nearly constant.

The pool of the triton and torch tiers (that of the native tier is described in kernels/cpu/native/kv_pool.h):

    pool, uint8 [num_blocks, block_bytes]; a block is
        data        [kv_heads][key, value][block_size][head_dim * bits / 8]   bits: of keys, or of values
        params      [kv_heads][key, value][block_size][scale, least]          float16

An int4 byte j of a row holds q[j] in its low and q[j + head_dim / 2] in its high bits, so that the two halves of a row are
unpacked without exchanging neighbours.

A plain pool of one layer is [num_blocks, block_size, key and value, kv_heads, head_dim]: a token's key and value lie together, so
that a block is one contiguous piece to copy, and a gather by block table yields tokens in order.

Kernels that read or write a pool take a `KVPool`, whose dimensions are the same for all layouts; its strides differ.

Kernels turn q into a float by setting bits, because conversion has a quarter of the rate: n becomes the low mantissa bits of a
power of two, so that the float is n + bias, and bias is folded into least. Four bytes are converted at a time; the byte
permutation and the magic numbers are FasterTransformer's (Kim et al. 2022):

    int4    128 + n in bfloat16, 64 + n in float16, of each half of the byte. The smaller the bias, the less is lost where
            matrix units cut off the last bits of a sum: 1024 + n had an error of 2 % on an H200 at 4,096 tokens
    int8    1024 + n in float16. The 7 mantissa bits of bfloat16 are too few: the upper bit of n makes 128 or 256, the lower ones
            255 - (n & 127), and their difference, n - 127, needs 8 significant bits, which bfloat16 has
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import INTERPRETED, jit, tl

# (rows, head_dim, bits)
CASES = [(1, 8, 8), (5, 64, 4), (33, 128, 4), (7, 96, 8)]

MAX_HALF = 65504.0


class KVFormat(NamedTuple):
    """Bits of a number of a key and of a value: 8 or 4; 16: they are of the model's type, float32 too."""

    key_bits: int = 16
    value_bits: int = 16

    @property
    def is_quantised(self) -> bool:
        return self.key_bits < 16


PLAIN = KVFormat()
# The formats that kernels have on every tier. Keys need the more bits: a softmax multiplies their errors.
KV_FORMATS = {"auto": PLAIN, "int8": KVFormat(8, 8), "int4": KVFormat(4, 4), "k8v4": KVFormat(8, 4)}


class KVPool(NamedTuple):
    """One layer's pool as kernels read it, whatever its layout."""

    keys: Tensor  # [num_blocks, block_size, kv_heads, row], a view with any strides, of which the last is 1
    values: (
        Tensor  # a view of the same memory with the same strides, but for that of tokens where rows have other lengths
    )
    # scale and least, float16 [num_blocks, block_size, 2, kv_heads, 2], a view; None: keys and values are there themselves
    params: Tensor | None
    head_dim: int
    format: KVFormat

    @property
    def sides(self) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
        """Keys, and values, each with the bits of a number."""
        return (self.keys, self.format.key_bits), (self.values, self.format.value_bits)

    @property
    def words(self) -> Tensor | None:
        """Views params as int32 [num_blocks, block_size, 2, kv_heads]: scale in the low half, least in the high half."""
        return None if self.params is None else self.params.view(torch.int32)[..., 0]

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements: those of block, token, side (from keys to values) and head, and of tokens of values; then of block, token,
        side and head of words, 0 if there are none.
        """
        of_words = (0, 0, 0, 0) if self.params is None else (stride // 2 for stride in self.params.stride()[:4])
        block, token, head, _ = self.keys.stride()
        side = self.values.storage_offset() - self.keys.storage_offset()
        return (block, token, side, head, self.values.stride(1), *of_words)


def plain_pool(pool: Tensor) -> KVPool:
    """The KVPool of pool [num_blocks, block_size, 2, kv_heads, head_dim]. Raises ValueError unless its last stride is 1."""
    if pool.stride(4) != 1:
        raise ValueError(f"the elements of a head have to lie together in the pool; they are {pool.stride(4)} apart")
    keys, values = pool.unbind(2)
    return KVPool(keys, values, None, pool.shape[4], PLAIN)


class PlainPool(NamedTuple):
    """The layout of one layer's pool of unquantised values."""

    block_size: int  # tokens
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.block_size, 2, self.kv_heads, self.head_dim)

    def view(self, pool: Tensor) -> KVPool:
        """The KVPool of pool [num_blocks, *block_shape]."""
        return plain_pool(pool)


class QuantizedPool(NamedTuple):
    """The layout of one layer's pool whose keys and values are each int8 or int4."""

    block_size: int  # tokens
    kv_heads: int
    head_dim: int  # a multiple of 8
    format: KVFormat  # a quantised one

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.block_bytes,)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of the key, and of the value, of one token and head."""
        return self.head_dim * self.format.key_bits // 8, self.head_dim * self.format.value_bits // 8

    @property
    def data_bytes(self) -> int:
        return self.kv_heads * self.block_size * sum(self.row_bytes)

    @property
    def block_bytes(self) -> int:
        return self.data_bytes + self.kv_heads * 2 * self.block_size * 4

    def view(self, pool: Tensor) -> KVPool:
        """The KVPool of pool uint8 [num_blocks, block_bytes]."""
        heads = pool[:, : self.data_bytes].unflatten(1, (self.kv_heads, -1))
        parts = heads.split([self.block_size * row for row in self.row_bytes], dim=2)
        keys, values = (part.unflatten(2, (self.block_size, -1)).transpose(1, 2) for part in parts)
        params = pool[:, self.data_bytes :].view(torch.float16).unflatten(1, (self.kv_heads, 2, self.block_size, 2))
        return KVPool(keys, values, params.transpose(1, 3), self.head_dim, self.format)


PoolLayout = PlainPool | QuantizedPool


def quantize_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises x [rows, head_dim]; returns q uint8 [rows, head_dim], scale float16 [rows], least float16 [rows]."""
    x = x.float()
    max_q = (1 << bits) - 1
    least = x.amin(1).clamp_(-MAX_HALF, MAX_HALF).half()
    shifted = x - least.float()[:, None]
    scale = (
        (shifted.amax(1) / max_q).clamp_(0, MAX_HALF).half()
    )  # it is negative for a constant row whose least was rounded up
    divisor = torch.where(scale > 0, scale.float(), torch.inf)[:, None]
    q = torch.floor(shifted / divisor + 0.5).clamp_(0, max_q)
    return q.to(torch.uint8), scale, least


def dequantize_rows(q: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Returns float32 [rows, head_dim] of q uint8 [rows, head_dim], scale and least float16 [rows]."""
    return q.float() * scale.float()[:, None] + least.float()[:, None]


def pack(q: Tensor, bits: int) -> Tensor:
    """Packs q uint8 [..., head_dim] to uint8 [..., head_dim * bits / 8]."""
    if bits == 8:
        return q
    low, high = q.chunk(2, dim=-1)
    return low | high << 4


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    return torch.cat((packed & 15, packed >> 4), dim=-1)


class Unpacking(NamedTuple):
    """How a kernel turns q into a 16-bit float, up to a bias."""

    asm: str | None  # PTX for four bytes in a register; None in the interpreter, whose operators give the same numbers
    bias: int


INT4_BFLOAT16 = """{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
}"""

INT4_FLOAT16 = """{
    .reg .b32 low, high;
    shl.b32 low, $4, 4;
    and.b32 low, low, 0xf0f0f0f0;
    and.b32 high, $4, 0xf0f0f0f0;
    prmt.b32 $0, low, 0x54545454, 0x4140;
    prmt.b32 $1, low, 0x54545454, 0x4342;
    prmt.b32 $2, high, 0x54545454, 0x4140;
    prmt.b32 $3, high, 0x54545454, 0x4342;
}"""

INT8_FLOAT16 = """{
    prmt.b32 $0, $2, 0x64646464, 0x4140;
    prmt.b32 $1, $2, 0x64646464, 0x4342;
}"""

INT8_BFLOAT16 = """{
    .reg .b32 lower, upper, minus, left, right;
    not.b32 lower, $2;
    and.b32 lower, lower, 0x7f7f7f7f;
    and.b32 upper, $2, 0x80808080;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 left, lower, 0x43434343, 0x4140;
    prmt.b32 right, upper, 0x43434343, 0x4140;
    fma.rn.bf16x2 $0, left, minus, right;
    prmt.b32 left, lower, 0x43434343, 0x4342;
    prmt.b32 right, upper, 0x43434343, 0x4342;
    fma.rn.bf16x2 $1, left, minus, right;
}"""


# (The queries' dtype, bits) -> (PTX, bias)
UNPACKING = {
    (torch.bfloat16, 4): (INT4_BFLOAT16, 128),
    (torch.float16, 4): (INT4_FLOAT16, 64),
    (torch.bfloat16, 8): (INT8_BFLOAT16, -127),
    (torch.float16, 8): (INT8_FLOAT16, 1024),
}


def unpacking(dtype: torch.dtype, bits: int, compiled: bool = not INTERPRETED) -> Unpacking:
    """The unpacking for queries of `dtype`; bits 16 means a plain pool. For float32, q is converted: a bias would lose bits."""
    if bits == 16 or dtype == torch.float32:
        return Unpacking(None, 0)
    asm, bias = UNPACKING[dtype, bits]
    return Unpacking(asm if compiled else None, bias)


def unpacking_constants(dtype: torch.dtype, format: KVFormat) -> dict[str, object]:
    """The constexpr arguments of a kernel that says of keys, and of values, how they become floats."""
    made: dict[str, object] = {}
    for side, bits in (("KEY", format.key_bits), ("VALUE", format.value_bits)):
        asm, bias = unpacking(dtype, bits)
        made |= {f"{side}_BITS": bits, f"{side}_ASM": asm, f"{side}_BIAS": bias}
    return made


def read_cells(pool: KVPool, blocks: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the keys and the values of some cells, each float64 [cells, kv_heads, head_dim]."""

    def read(side: int) -> Tensor:
        data, bits = pool.sides[side]
        if pool.params is None:
            return data[blocks, cells].double()
        q = unpack(data[blocks, cells], bits)  # [cells, kv_heads, head_dim]
        scale, least = pool.params[blocks, cells, side].flatten(0, 1).unbind(1)
        return dequantize_rows(q.flatten(0, 1), scale, least).double().view(q.shape)

    return read(0), read(1)


def write_cells(pool: KVPool, blocks: Tensor, cells: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes keys and values, each [cells, kv_heads, head_dim], in the pool's format."""
    for side, rows in enumerate((keys, values)):
        data, bits = pool.sides[side]
        if pool.params is None:
            data[blocks, cells] = rows.to(data.dtype)
            continue
        q, scale, least = quantize_rows(rows.flatten(0, 1), bits)
        data[blocks, cells] = pack(q, bits).unflatten(0, rows.shape[:2])
        pool.params[blocks, cells, side] = torch.stack((scale, least), dim=1).unflatten(0, rows.shape[:2])


@jit
def floats_of_int4(
    packed,  # uint8
    DTYPE: tl.constexpr,  # the queries' dtype
    ASM: tl.constexpr,
):
    """Returns the low and the high halves of the bytes as floats, each plus the bias."""
    if DTYPE == tl.float32:
        return (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
    elif ASM is None:
        low, high = (packed & 15).to(tl.int16), (packed >> 4).to(tl.int16)
        if DTYPE == tl.float16:
            low, high = (low << 4) | 0x5400, (high << 4) | 0x5400
        else:
            low, high = low | 0x4300, high | 0x4300
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), True, 4)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4)


@jit
def floats_of_int8(
    q,  # uint8
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Returns q as a float, plus the bias."""
    if DTYPE == tl.float32:
        return q.to(tl.float32)
    elif ASM is None:
        if DTYPE == tl.float16:
            return (q.to(tl.int16) | 0x6400).to(DTYPE, bitcast=True)
        else:
            return (q.to(tl.float32) - 127).to(DTYPE)
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [q], tl.float16, True, 4)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [q], tl.bfloat16, True, 4)


@jit
def load_seen(at, seen, MASKED: tl.constexpr):
    """Loads only what is seen, because the rest may hold anything, even NaN. Without MASKED, all is seen."""
    if MASKED:
        return tl.load(at, seen, other=0)
    else:
        return tl.load(at)


@jit
def scale_and_least(
    words,  # int32: KVPool.words
):
    """Returns scale and least, each float32."""
    scale = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def dequantised(
    n,  # [N, D] uint8
    params,  # [N] int32: a float16 scale in the low half, and a float16 least in the high half
    dtype: tl.constexpr,
):
    """Returns the numbers [N, D] of quantised rows."""
    scale, least = scale_and_least(params)
    return (n.to(tl.float32) * scale[:, None] + least[:, None]).to(dtype)
