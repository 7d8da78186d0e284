"""The activation of an mlp, by its settings: those of kernels/activation.py, and one that has no kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from backend.architectures.description import Block
from kernels import activation


def activate(given: Tensor, block: Block) -> Tensor:
    """given [..., intermediate], or twice that with a gate -> [..., intermediate]."""
    if block.activation == "relu2":
        return F.relu(given.float()).square().to(given.dtype)
    return activation.activate(given, block.activation, block.gated)
