"""Whole modules of a model whose other parts are run by other code, in one native call each (native/modules.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref

import torch
from torch import Tensor

from kernels.cpu.attention import NativeAttention, Scratch, StepRows
from kernels.cpu.decoder import MAX_HEAD_DIM, UnknownCell
from kernels.cpu.linear import PackedLinear
from kernels.cpu.mixture import mlp_structs
from kernels.cpu.structs import (
    ACTIVATIONS,
    AttentionModuleStruct,
    MixtureStruct,
    NormStruct,
)


class NativeAttentionModule:
    """x -> the product of `out` with the attention of the queries, keys and values that `qkv` makes of x."""

    def __init__(
        self,
        library: CDLL,
        scratch: Scratch,
        attention: NativeAttention,
        qkv: PackedLinear,  # [(heads + 2 * kv_heads) * head_dim, hidden]
        out: PackedLinear,  # [hidden, heads * head_dim]
        norms: tuple[Tensor, Tensor]
        | None = None,  # weights of the RMS norms of each query and key, float32 [head_dim]
        eps: float = 0.0,
        rotary_dim: int = 0,
        is_interleaved: bool = False,  # dimensions 2i and 2i + 1 are rotated together
    ) -> None:
        """Raises ValueError for parts that do not fit together."""
        heads, head_dim = attention.q_shape
        sizes = (heads + 2 * attention.kv_heads) * head_dim, heads * head_dim
        if (qkv.shape[0], out.shape[1]) != sizes or head_dim > MAX_HEAD_DIM or not 0 <= rotary_dim <= head_dim:
            raise ValueError(
                f"layers of {qkv.shape} and {out.shape} do not fit an attention of {sizes}, of which {rotary_dim} rotate"
            )
        if norms is not None and any(norm.shape != (head_dim,) or norm.dtype != torch.float32 for norm in norms):
            raise ValueError(f"norms of heads need {head_dim} float32 numbers")
        self._library, self._scratch = library, scratch
        self._held = attention, qkv, out, norms
        norm_structs = [NormStruct(None if norms is None else norms[i].data_ptr(), None) for i in range(2)]
        self._module = AttentionModuleStruct(
            attention.struct, qkv.struct, out.struct, *norm_structs, rotary_dim, is_interleaved, eps
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, rows: StepRows, layer: int) -> Tensor:
        """x [tokens, hidden], contiguous, of the attention's type; cos, sin float32 [tokens, rotary_dim / 2], contiguous.

        Returns what is like x. Raises UnknownCell, before anything is written, for a block that does not exist.
        """
        if x.shape[0] != rows.tokens:
            raise ValueError(f"x has {x.shape[0]} tokens, the rows have {rows.tokens}")
        out = x.new_empty(x.shape[0], self._module.out.n)
        addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), self._scratch.address
        bad = self._library.everbatch_attend_with_products(byref(self._module), byref(rows.of_layer(layer)), *addresses)
        if bad >= 0:
            raise UnknownCell(bad)
        return out


class NativeMixture:
    """Computes down(activation(gate) * up) of one MLP, or the weighted sum over the MLPs that a router chose for each token."""

    def __init__(
        self,
        library: CDLL,
        scratch: Scratch,
        experts: Sequence[tuple[PackedLinear, PackedLinear]],  # gate and up in one, and down, of each expert
        activation: str,  # an entry of ACTIVATIONS
        is_gated: bool,
        threads: int,
    ) -> None:
        """Raises ValueError for experts of different sizes, or whose inputs differ in form."""
        self._mlps = mlp_structs(experts)
        up, down = (part.shape for part in experts[0])
        if up[0] != down[1] * (2 if is_gated else 1):
            raise ValueError(f"experts have products of {up} and {down}: they do not fit together")
        self._library, self._scratch, self._held, self._threads = library, scratch, experts, threads
        self.hidden = down[0]
        self._mixture = MixtureStruct(self._mlps, len(experts), 1, ACTIVATIONS[activation], is_gated)

    def __call__(self, x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """x [tokens, hidden], contiguous, float32 or bfloat16. chosen int64 and weights float32 [tokens, experts of a token],
        contiguous; without them every token has the first expert, times 1. Returns what is like x.
        """
        out = x.new_empty(x.shape[0], self.hidden)
        self._mixture.places = 1 if chosen is None else chosen.shape[1]
        tables = (None if table is None else table.data_ptr() for table in (chosen, weights))
        self._library.everbatch_mix(
            byref(self._mixture),
            x.data_ptr(),
            x.shape[0],
            *tables,
            x.dtype.itemsize,
            out.data_ptr(),
            self._threads,
            self._scratch.address,
        )
        return out


class NativeRmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, of the last dimension."""

    def __init__(self, library: CDLL, scratch: Scratch, weight: Tensor, eps: float, threads: int) -> None:
        self._library, self._scratch, self._threads = library, scratch, threads
        self.weight, self.eps = weight.float().contiguous(), eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size], contiguous, float32 or bfloat16."""
        out, n = torch.empty_like(x), self.weight.shape[0]
        self._library.everbatch_rms_norm(
            self.weight.data_ptr(),
            self.eps,
            x.data_ptr(),
            x.numel() // n,
            n,
            x.dtype.itemsize,
            out.data_ptr(),
            self._threads,
            self._scratch.address,
        )
        return out
