"""Log-probabilities of a prompt's own tokens, in the form in which a step tells them (backend/core/gathered.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling as kernel


def packed_rows(logits: Tensor, following: Tensor, num_top: int) -> Tensor:
    """Rank and log-probability of the token that follows each row, and the `num_top` most likely tokens with theirs.

    logits [rows, vocab] in any float type; following [rows] int64. Returns [rows, 2 + 2 * num_top] int32: rank, token ids, then
    the bits of float32 log-probabilities. Equal ones are in the order of token ids; all of them have the best rank of theirs.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    own = log_probs.gather(1, following[:, None])  # [rows, 1]
    rank = (log_probs > own).sum(dim=1, keepdim=True) + 1
    top, ids = kernel.top_log_probs(log_probs, num_top) if num_top else (own[:, :0], rank[:, :0])
    values = torch.cat([own, top], dim=1).view(torch.int32)
    return torch.cat([rank.int(), ids.int(), values], dim=1)
