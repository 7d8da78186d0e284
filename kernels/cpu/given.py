"""Inputs of a native step besides token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Given(NamedTuple):
    """Embeddings and positions of a step's tokens (all rows concatenated) that differ from those of their ids and places."""

    embedded: NDArray[np.uintp] | None  # address of a token's embedding, float32 [hidden]; 0: that of its id
    positions: NDArray[np.int64] | None  # by which queries and keys are rotated
    vectors: Sequence[Tensor] = ()  # own the memory that `embedded` and `added` point to
    added: NDArray[np.uintp] | None = (
        None  # [layers, tokens]: address of what the first layers' results get, float32 [hidden]
    )
    tables: tuple[Tensor, Tensor] | None = None  # cos and sin, float32 [tokens, rotary_dim / 2], for all layers
    ends: NDArray[np.int32] | None = (
        None  # one past the last key that a token sees: never fewer for a later token of a row
    )


class Passing(NamedTuple):
    """Hidden states of a step of some of the layers, float32 [tokens of all rows, hidden]."""

    entering: Tensor | None = None  # the results of the layers before; None: the tokens' embeddings
    leaving: Tensor | None = None  # is filled with what the last layer yields; None: norm and output head follow
