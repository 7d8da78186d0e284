"""A causal convolution of each channel on its own, whose window is part of a sequence's state (Mamba, arXiv:2312.00752).

y_t = activation(bias + the sum over j < taps of weight[:, j] * u at t - taps + 1 + j)       summed from the oldest to the newest

Inputs before a row's first token come from the window [taps - 1, channels] of its state, the oldest first. All numbers are
float32, and each y is the same however the tokens of a sequence are divided among calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.state_rows import StateRows

# taps, channels, tokens of each row
CASES = [(4, 24, (1, 1, 5)), (3, 40, (7,)), (2, 64, (1, 9)), (4, 8, (2, 1))]


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
    return reference(u, weight, bias, windows, rows, is_activated)
