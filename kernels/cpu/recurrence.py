"""Recurrent layers of native steps (native/recurrence.h), and the states that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.linear import PackedLinear
from kernels.cpu.structs import RECURRENCES, BatchStruct, LinearStruct, NormStruct, RecurrenceStruct

MOST_TAPS = 4
_NO_SAVES = np.empty((0, 3), dtype=np.int32)
_UNBOUNDED = float("inf")


@dataclass(slots=True)
class NativeRecurrence:
    """A recurrent mixer in the place of attention. Its tensors are float32. A convolution has none of heads; their sizes are 0.

    A token's inputs are the channels of a causal convolution, then the gate of the result [value_heads * value_dim]. Of the
    kind `convolution` they are B, C and X [channels] each; B * X is convolved, and C times that is the result.
    The channels are queries and keys [key_heads, key_dim] and values [value_heads, value_dim], in any order. Each value head
    has a state [key_dim, value_dim], which decays by exp(-rate * dt), with dt = softplus(the decay's gate + dt_bias), and takes

        delta    key x (value - state @ key) * sigmoid(the other gate); queries and keys are normalised before
        sum      key x value * dt

    Its result is state @ query, and `skip` * value besides.
    """

    kind: str  # an entry of RECURRENCES
    inputs: PackedLinear  # [channels + value_heads * value_dim, hidden], or [3 * channels, hidden]
    weights: Tensor  # [taps, channels] of the convolution, the oldest token's first
    bias: Tensor | None = None  # [channels]
    gates: PackedLinear | None = (
        None  # [value_heads, of `delta` twice, hidden], of floats: of decays, then of strengths
    )
    key_heads: int = 0
    value_heads: int = 0  # a multiple of key_heads; neighbours share a key
    key_dim: int = 0
    value_dim: int = 0
    query_at: int = 0  # the first channel of queries
    key_at: int = 0
    value_at: int = 0
    query_scale: float = 1.0  # a factor of normalised queries
    rate: Tensor | None = None  # [value_heads], greater than 0
    dt_bias: Tensor | None = None  # [value_heads]
    skip: Tensor | None = None  # [value_heads], only of `sum`
    dt_min: float = 0.0  # between these two lies dt of `sum`
    dt_max: float = _UNBOUNDED
    norm: Tensor | None = None  # RMS norm of a result, of groups: [norm_size]; of `sum` [value_heads * value_dim]
    norm_size: int = 0  # numbers of a group
    gates_first: bool = False  # the result is multiplied with silu(gate) before the norm; else after it

    @property
    def state_floats(self) -> int:
        """Numbers of a state: the window of the convolution [taps - 1, channels], then the heads [heads, key, value]."""
        taps, channels = self.weights.shape
        return (taps - 1) * channels + self.value_heads * self.key_dim * self.value_dim


class NativeStates(NamedTuple):
    """The states that the rows of a step go on from and leave.

    No other row of the step may read or write a state that is written; its own row may read it where it is the one of `rows`.
    """

    pools: Sequence[Tensor | None]  # one a layer: float32 [states, state_floats]; None for one with attention
    rows: NDArray[
        np.int32
    ]  # [rows, 3]: the state behind the tokens before the row, -1 at the beginning of a sequence; the
    # state that is written, -1 = none; behind how many of the row's tokens that is
    saves: NDArray[np.int32] = (
        _NO_SAVES  # [saves, 3], sorted: a row, behind how many of its tokens, another state that is written
    )


class StatePlaces:
    """Tells C where states lie. Looking up addresses is slow, so that those of the last step's pools are kept."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # how many floats a state of each layer has; 0: it has none
        self._placed: tuple[Tensor | None, ...] = ()

    def place(self, batch: BatchStruct, states: NativeStates | None) -> object:
        """The caller keeps the result until the step is over. Raises ValueError for pools that do not fit the layers."""
        if not any(self._sizes):
            return None
        if states is None:
            raise ValueError("the model has recurrent layers, whose steps need states")
        if len(states.pools) != len(self._placed) or not all(map(is_, states.pools, self._placed)):
            self._place_pools(batch, states.pools)
        rows, saves = (np.ascontiguousarray(table, dtype=np.int32) for table in (states.rows, states.saves))
        if rows.shape != (batch.num_rows, 3):
            raise ValueError(f"states.rows is {rows.shape}, the step has {batch.num_rows} rows")
        batch.state_rows, batch.saves, batch.num_saves = rows.ctypes.data, saves.ctypes.data, len(saves)
        return rows, saves

    def _place_pools(self, batch: BatchStruct, pools: Sequence[Tensor | None]) -> None:
        there = [pool for pool in pools if pool is not None]
        shapes = [0 if pool is None else pool.shape[1] for pool in pools]
        if shapes != list(self._sizes) or len({len(pool) for pool in there}) != 1:
            raise ValueError(f"states of {shapes} floats a layer do not fit a model whose layers have {self._sizes}")
        if not all(pool.dtype == torch.float32 and pool.is_contiguous() for pool in there):
            raise ValueError("the states are not contiguous float32")
        self._placed = tuple(pools)
        batch.states = (c_void_p * len(pools))(*(None if pool is None else pool.data_ptr() for pool in pools))
        batch.num_states = len(there[0])


def recurrence_struct(recurrence: NativeRecurrence) -> RecurrenceStruct:
    """Raises ValueError for sizes that do not fit each other."""
    of, (taps, channels) = recurrence, recurrence.weights.shape
    _check(recurrence)
    return RecurrenceStruct(
        RECURRENCES[of.kind],
        channels,
        taps,
        *(of.key_heads, of.value_heads, of.key_dim, of.value_dim),
        *(of.query_at, of.key_at, of.value_at),
        of.query_scale,
        of.weights.data_ptr(),
        _address(of.bias),
        of.inputs.struct,
        LinearStruct() if of.gates is None else of.gates.struct,
        *map(_address, (of.rate, of.dt_bias, of.skip)),
        *(of.dt_min, of.dt_max),
        NormStruct(_address(of.norm), None),
        of.norm_size,
        of.gates_first,
    )


def _check(of: NativeRecurrence) -> None:
    taps, channels = of.weights.shape
    results, is_delta = of.value_heads * of.value_dim, of.kind == "delta"
    sizes: list[tuple[str, Tensor | None, int]] = [("bias", of.bias, channels)]
    if of.kind == "convolution":
        rows, gates = 3 * channels, 0
        fits = not (results or of.key_heads or of.key_dim)
    else:
        rows, gates = channels + results, of.value_heads * (2 if is_delta else 1)
        keys = of.key_heads * of.key_dim
        ends = [of.query_at + keys, of.key_at + keys, of.value_at + results]
        fits = keys > 0 and results > 0 and of.value_heads % of.key_heads == 0 and max(ends) <= channels
        fits = fits and of.rate is not None and of.dt_bias is not None and not (is_delta and of.skip is not None)
        heads = (("rate", of.rate), ("dt_bias", of.dt_bias), ("skip", of.skip))
        sizes += [(name, tensor, of.value_heads) for name, tensor in heads]
        sizes.append(("norm", of.norm, of.norm_size if is_delta else results))
    if of.norm is not None:
        fits = fits and of.norm_size > 0 and results % of.norm_size == 0
    if not fits or not 1 <= taps <= MOST_TAPS or of.kind not in RECURRENCES:
        raise ValueError(f"the sizes of a recurrence of the kind {of.kind} with {taps} taps do not fit: {of}")
    found = of.inputs.shape[0], 0 if of.gates is None else of.gates.shape[0]
    if found != (rows, gates):
        raise ValueError(f"the inputs and gates of a recurrence have {found} rows, its sizes ask for {(rows, gates)}")
    for name, tensor, size in [*sizes, ("weights", of.weights, taps * channels)]:
        if tensor is not None and not (
            tensor.numel() == size and tensor.dtype == torch.float32 and tensor.is_contiguous()
        ):
            raise ValueError(f"{name} of a recurrence is {tensor.dtype} {tuple(tensor.shape)}, not float32 of {size}")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
