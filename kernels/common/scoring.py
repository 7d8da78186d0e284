"""How products of queries and keys become scores, and scores weights, where torch's attention does not compute it.

score  = softcap(scale * q k^T)          softcap(x) = cap * tanh(x / cap)                    (Gemma 2, arXiv:2408.00118)
weight = exp(score) / (sum of exp(score) + exp(sink))                          a sink of a head is a logit without a value
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import jit, tl


class Scoring(NamedTuple):
    """How a model turns products of queries and keys into scores."""

    scale: float | None = None  # their factor; None = 1 / sqrt(head_dim)
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # float32 [heads]

    @property
    def is_plain(self) -> bool:
        """True if torch's attention computes it."""
        return not self.softcap and self.sinks is None


PLAIN = Scoring()
LOG2_E = 1.4426950408889634  # kernels compute with exponentials of 2


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Attends in float32, with a soft cap and sinks; the result is like q.

    q [rows, kv_heads, group, queries, head_dim]; k, v [rows, kv_heads, keys, head_dim]; mask is added to the scores, which are
    [rows, kv_heads, group, queries, keys].
    """
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = q.float() @ k.float()[:, :, None].mT * scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.float()[:, :, None]).to(q.dtype)


@jit
def capped(
    x,  # float32
    cap,  # in the unit of x
):
    """cap * tanh(x / cap)."""
    return cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0))
