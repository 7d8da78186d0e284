"""A causal convolution of each channel on its own, whose window is part of a sequence's state (Mamba, arXiv:2312.00752).

y_t = activation(bias + the sum over j < taps of weight[:, j] * u at t - taps + 1 + j)       summed from the oldest to the newest

Inputs before a row's first token come from the window [taps - 1, channels] of its state, the oldest first. All numbers are
float32, and each y is the same however the tokens of a sequence are divided among calls.

On a GPU one launch computes y, and another writes the windows: a row's source may be its target, and tokens read the source.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.state_rows import ROW_NUMBERS, StateRows
from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl

# taps, channels, tokens of each row
CASES = [(4, 24, (1, 1, 5)), (3, 40, (7,)), (2, 64, (1, 9)), (4, 8, (2, 1)), (1, 24, (3, 1)), (4, 136, (3, 37))]
BLOCK_TOKENS, BLOCK_CHANNELS, NUM_WARPS = 8, 128, 4


def reference(
    u: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: StateRows, is_activated: bool
) -> Tensor:
    """u [tokens, channels], weight [channels, taps], bias [channels], windows [states, taps - 1, channels], which is written.

    is_activated: the activation is silu, else there is none. Returns [tokens, channels].
    """
    taps = weight.shape[1]
    out = torch.empty_like(u)
    for row, (source, _, _) in enumerate(rows.numbers.tolist()):
        first, end = rows.starts[row : row + 2].tolist()
        before = windows.new_zeros(windows.shape[1:]) if source < 0 else windows[source]
        inputs = torch.cat((before, u[first:end]))
        total = torch.zeros_like(u[first:end])
        for tap in range(taps):
            total += inputs[tap : tap + end - first] * weight[:, tap]
        if bias is not None:
            total += bias
        out[first:end] = F.silu(total) if is_activated else total
        for tokens, state in rows.writes_of(row):
            windows[state] = inputs[tokens : tokens + taps - 1]
    return out


def causal_convolution(
    u: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: StateRows, is_activated: bool
) -> Tensor:
    """See `reference`."""
    if not runs_on(u):
        return reference(u, weight, bias, windows, rows, is_activated)
    u = u if u.stride(1) == 1 else u.contiguous()
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    (tokens, channels), taps = u.shape, weight.shape[1]
    if not tokens:
        return out
    placed, blocks = rows.on(u.device), -(-channels // BLOCK_CHANNELS)
    _convolution_kernel[(-(-tokens // BLOCK_TOKENS), blocks)](
        u, weight.contiguous(), bias, windows, placed.rows, placed.row_of_token, out, tokens, channels, u.stride(0),
        windows.stride(0), ROW_NUMBERS=ROW_NUMBERS, TAPS=taps, IS_ACTIVATED=is_activated, BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_CHANNELS=BLOCK_CHANNELS, num_warps=NUM_WARPS,
    )  # fmt: skip
    if taps > 1:
        _window_kernel[(len(placed.rows), blocks)](
            u, windows, placed.rows, placed.pieces, channels, u.stride(0), windows.stride(0), ROW_NUMBERS=ROW_NUMBERS,
            TAPS=taps, BLOCK_WINDOW=next_power_of_two(taps - 1), BLOCK_CHANNELS=BLOCK_CHANNELS, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


@jit(do_not_specialize=["tokens"])
def _convolution_kernel(
    u,  # [tokens, channels]
    weight,  # [channels, TAPS]
    bias,  # [channels], or None
    windows,  # [states, TAPS - 1, channels]
    rows,  # [rows, ROW_NUMBERS] int32
    row_of_token,  # [tokens] int32
    out,  # [tokens, channels]
    tokens,
    channels,
    u_stride,  # between tokens
    state_stride,  # between states
    ROW_NUMBERS: tl.constexpr,
    TAPS: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_token, is_channel = token < tokens, channel < channels
    row = rows + ROW_NUMBERS * tl.load(row_of_token + token, is_token, other=0)
    at = token - tl.load(row, is_token, other=0)  # the token's place in its row
    source = tl.load(row + 1, is_token, other=-1)
    mask = is_token[:, None] & is_channel[None, :]
    window = (windows + source.to(tl.int64) * state_stride)[:, None] + channel[None, :]
    new = (u + token.to(tl.int64) * u_stride)[:, None] + channel[None, :]
    total = tl.zeros((BLOCK_TOKENS, BLOCK_CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap  # the tap weighs the input of so many tokens before
        given = tl.load(new - back * u_stride, mask & (at >= back)[:, None], other=0)
        if tap < TAPS - 1:
            is_old = mask & ((at < back) & (source >= 0))[:, None]
            given += tl.load(window + ((at + tap) * channels)[:, None], is_old, other=0)  # one of both is 0
        total = tl.fma(given, tl.load(weight + channel * TAPS + tap, is_channel, other=0)[None, :], total)
    if bias is not None:
        total += tl.load(bias + channel, is_channel, other=0)[None, :]
    if IS_ACTIVATED:
        total = total / (1 + tl.exp(-total))
    tl.store(out + (token.to(tl.int64) * channels)[:, None] + channel[None, :], total, mask)


@jit
def _window_kernel(
    u,  # [tokens, channels]
    windows,  # [states, TAPS - 1, channels]
    rows,  # [rows, ROW_NUMBERS] int32
    pieces,  # [pieces, 2] int32
    channels,
    u_stride,  # between tokens
    state_stride,  # between states
    ROW_NUMBERS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,  # a power of two, at least TAPS - 1
    BLOCK_CHANNELS: tl.constexpr,
):
    """A program writes all windows of a row, the target last: it may be the source, which the others are made of."""
    row = rows + ROW_NUMBERS * tl.program_id(0)
    first, source, target = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    for piece in range(tl.load(row + 4), tl.load(row + 5)):
        state = tl.load(pieces + 2 * piece + 1)
        if (state >= 0) & (state != target):
            behind = tl.load(pieces + 2 * piece) - first
            window = _window_behind(
                u, windows, first, source, behind, channels, u_stride, state_stride, TAPS, BLOCK_WINDOW, BLOCK_CHANNELS
            )
            _store_window(windows, state, window, channels, state_stride, TAPS, BLOCK_WINDOW, BLOCK_CHANNELS)
    if target >= 0:
        count = tl.load(row + 3)
        window = _window_behind(
            u, windows, first, source, count, channels, u_stride, state_stride, TAPS, BLOCK_WINDOW, BLOCK_CHANNELS
        )
        tl.debug_barrier()  # threads write what others read
        _store_window(windows, target, window, channels, state_stride, TAPS, BLOCK_WINDOW, BLOCK_CHANNELS)


@jit
def _window_behind(
    u,
    windows,
    first,
    source,
    behind,
    channels,
    u_stride,
    state_stride,
    TAPS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """The window behind so many tokens of the row that begins at `first`, [BLOCK_WINDOW, BLOCK_CHANNELS]."""
    entry = tl.arange(0, BLOCK_WINDOW)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    at = behind + entry - (TAPS - 1)  # the place of the entry's token in the row
    mask = (entry < TAPS - 1)[:, None] & (channel < channels)[None, :]
    new = u + ((first + at).to(tl.int64) * u_stride)[:, None] + channel[None, :]
    old = windows + source.to(tl.int64) * state_stride + ((behind + entry) * channels)[:, None] + channel[None, :]
    of_row = tl.load(new, mask & (at >= 0)[:, None], other=0)
    return of_row + tl.load(old, mask & ((at < 0) & (source >= 0))[:, None], other=0)  # one of both is 0


@jit
def _store_window(
    windows,
    state,
    window,
    channels,
    state_stride,
    TAPS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    entry = tl.arange(0, BLOCK_WINDOW)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    mask = (entry < TAPS - 1)[:, None] & (channel < channels)[None, :]
    at = windows + state.to(tl.int64) * state_stride + (entry * channels)[:, None] + channel[None, :]
    tl.store(at, window, mask)


def variants() -> dict[str, Variant]:
    types = {
        "u": "*fp32",
        "windows": "*fp32",
        "rows": "*i32",
        "channels": "i32",
        "u_stride": "i32",
        "state_stride": "i32",
    }
    divisible = ("channels", "u_stride", "state_stride")
    computes = types | {"weight": "*fp32", "row_of_token": "*i32", "out": "*fp32", "tokens": "i32"}
    made = {}
    for taps, has_bias, is_activated in ((4, False, True), (4, True, True), (3, False, False)):
        name = f"{taps}{'-bias' if has_bias else ''}{'-silu' if is_activated else ''}"
        sizes = {"ROW_NUMBERS": ROW_NUMBERS, "TAPS": taps, "BLOCK_CHANNELS": BLOCK_CHANNELS}
        bias = {"bias": "*fp32"} if has_bias else {}
        absent: dict[str, object] = {} if has_bias else {"bias": None}
        constants = absent | sizes | {"IS_ACTIVATED": is_activated, "BLOCK_TOKENS": BLOCK_TOKENS}
        made[name] = Variant(_convolution_kernel, computes | bias, constants, NUM_WARPS, divisible=divisible)
        if not has_bias:
            block = sizes | {"BLOCK_WINDOW": next_power_of_two(taps - 1)}
            writes = types | {"pieces": "*i32"}
            waits = dict.fromkeys((80, 90, 100), ("BAR",))  # before the target is written
            made[f"window-{taps}"] = Variant(
                _window_kernel, writes, block, NUM_WARPS, divisible=divisible, instructions=waits
            )
    return made
