"""A mixture of experts of a layer, for native steps (native/mixture.h)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from typing import NamedTuple

from torch import Tensor

from kernels.cpu.linear import PackedLinear
from kernels.cpu.structs import SCORES, MixtureStruct, MlpStruct, RoutingStruct


class NativeExperts(NamedTuple):
    """A mixture of experts in the place of an MLP. backend/architectures/description.py, Experts, says what its settings mean."""

    router: PackedLinear  # [experts, and one more where there is a shared gate, hidden]
    experts: Sequence[tuple[PackedLinear, PackedLinear]]  # gate and up in one, and down, of each that this process has
    places: int
    scores: str  # an entry of SCORES
    is_normalised: bool
    scale: float
    groups: int
    kept_groups: int
    adds_two_best: bool
    choice_bias: Tensor | None  # float32 [experts]
    shared: tuple[PackedLinear, PackedLinear] | None
    has_shared_gate: bool
    first: int = 0  # the number of experts[0] among all


def mixture_struct(experts: NativeExperts, activation: int, is_gated: bool) -> MixtureStruct:
    """activation: a value of ACTIVATIONS. Raises ValueError for experts of different sizes, or whose inputs differ in form."""
    shared = experts.shared
    return MixtureStruct(
        mlp_structs(experts.experts),
        len(experts.experts),
        experts.places,
        activation,
        is_gated,
        None if shared is None else mlp_structs([shared]),
        experts.router.struct,
        RoutingStruct(
            SCORES[experts.scores],
            experts.is_normalised,
            experts.groups,
            experts.kept_groups,
            experts.adds_two_best,
            experts.scale,
            None if experts.choice_bias is None else experts.choice_bias.data_ptr(),
        ),
        experts.has_shared_gate,
        experts.first,
    )


def mlp_structs(mlps: Sequence[tuple[PackedLinear, PackedLinear]]) -> Array[MlpStruct]:
    """Gate and up in one, and down, of each. Raises ValueError for MLPs of different sizes, or whose inputs differ in form."""
    forms = {tuple((part.shape, part.operand) for part in mlp) for mlp in mlps}
    if len(forms) != 1:
        raise ValueError(f"the experts of a layer have products of {len(forms)} forms: {sorted(map(str, forms))[:2]}")
    return (MlpStruct * len(mlps))(*(MlpStruct(up.struct, down.struct) for up, down in mlps))
