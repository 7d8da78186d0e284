"""Replaces whole modules of a model by one native call each: RMS norms, attention with its linear layers, MLPs, and experts.

A module's own code costs some ten operators of torch, which take longer than the work itself for a few tokens. Which modules can
be replaced is found by trying. One that has the parts of such a module, and no other, is computed both ways for the tokens of a
trial, and is replaced where the results agree. All others are run by their own code, over the engine's linear layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from backend.hosted.attention import AttentionHost
from backend.hosted.layers import EngineLinear, FusedLinear
from kernels.cpu.attention import NativeAttention, Scratch, StepRows
from kernels.cpu.linear import PackedLinear
from kernels.cpu.modules import NativeAttentionModule, NativeMixture, NativeRmsNorm

log = logging.getLogger("everbatch.worker")

# The largest difference of the results of a trial, as a part of their size (root mean square). Native modules round once, where
# module code rounds after each operator.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUT = ("o_proj", "out_proj", "dense")
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_DOWN = ("down_proj",)
# How module code lays out the angles of a head: dimensions 2i and 2i + 1 belong together, and the angles that are not repeated.
_ROTARY: tuple[tuple[bool, Callable[[Tensor], Tensor]], ...] = (
    (False, lambda table: table[..., : table.shape[-1] // 2]),
    (False, lambda table: table),
    (True, lambda table: table[..., : table.shape[-1] // 2]),
    (True, lambda table: table[..., ::2]),
    (False, lambda table: table[..., :0]),  # a layer that does not rotate
)
# Functions that change only some values, which the numbers of a trial may not show. Modules that call one keep their own code.
_THRESHOLDS = {"clamp", "clamp_", "clip", "clip_", "where", "minimum", "maximum", "min", "max", "masked_fill", "floor"}


class Attentions(Protocol):
    """The attention of a tier: what is native of it."""

    library: CDLL
    scratch: Scratch
    threads: int
    rows: StepRows  # the rows of the present step

    def of_layer(self, index: int) -> NativeAttention: ...


class _Call(NamedTuple):
    """One call of a module in the trial."""

    args: tuple[Any, ...]
    given: dict[str, Any]
    result: Any


class NativeModules:
    def __init__(self, host: AttentionHost, attentions: Attentions) -> None:
        self._host, self._attentions = host, attentions
        self._norms: dict[int, NativeRmsNorm] = {}  # by the id of the module
        self._angles: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # cosines and sines of this step, by the id of the module code's table
        self._tables: list[Tensor] = []  # tables of this step; a table that is freed would give its id to another
        self.found: dict[str, int] = {}  # how many modules of a class are native
        self._own: list[tuple[Any, Callable[..., Any]]] = []  # replaced modules, and what ran them

    def begin(self) -> None:
        """Forget the angles of the step before."""
        self._angles.clear()
        self._tables.clear()

    def install(self, model: nn.Module, trial: Callable[[], object]) -> None:
        """Replace what can be replaced. `trial` runs a few tokens of one sequence."""
        with _recorded(model) as calls:
            trial()
        for find in (self._norm, self._mlp, self._experts, self._attention):  # an attention may have norms
            for module in model.modules():
                call = calls.get(id(module))
                if call is None or _has_thresholds(type(module)) or _takes_adapters(module):
                    continue
                try:
                    forward = find(module, call)
                except ValueError:  # parts that do not fit into one call, as those of another kind of attention
                    continue
                if forward is not None:
                    self._own.append((module, module.forward))
                    module.forward = forward
                    self.found[type(module).__name__] = self.found.get(type(module).__name__, 0) + 1
        if self.found:
            log.info("native modules: %s", ", ".join(f"{count} {name}" for name, count in self.found.items()))

    def remove(self) -> None:
        """Let the modules' own code run them again."""
        for module, forward in self._own:
            module.forward = forward
        self._own.clear()
        self.found.clear()

    def _norm(self, module: nn.Module, call: _Call) -> Callable[..., Any] | None:
        weight, eps = getattr(module, "weight", None), _eps_of(module)
        parts = list(module.parameters())
        if eps is None or len(parts) != 1 or parts[0] is not weight or weight.dim() != 1 or _has(module, ()):
            return None
        for shifted in (weight.float(), weight.float() + 1):  # some families hold weight - 1
            norm = NativeRmsNorm(*self._place, shifted, eps, self._attentions.threads)

            def forward(x: Tensor, norm: NativeRmsNorm = norm) -> Tensor:
                return norm(x.contiguous())

            if self._agrees(forward, call):
                self._norms[id(module)] = norm
                return forward
        return None

    def _mlp(self, module: nn.Module, call: _Call) -> Callable[..., Any] | None:
        parts = _parts(module, _GATE_UP, _DOWN)
        activation = _activation_of(module)
        if parts is None or activation is None or call.given or len(call.args) != 1:
            return None
        mlp = NativeMixture(*self._place, [parts], activation, is_gated=True, threads=self._attentions.threads)

        def forward(x: Tensor) -> Tensor:
            return mlp(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], mlp.hidden)

        return forward if self._agrees(forward, call) else None

    def _experts(self, module: Any, call: _Call) -> Callable[..., Any] | None:
        held = getattr(module, "engine_experts", None)
        if held is None or getattr(module, "has_post_expert_norm", False) or len(call.args) != 3 or call.given:
            return None
        activation, is_gated = _activation_of(module), "gate_up_proj" in held
        pairs = list(zip(held["gate_up_proj" if is_gated else "up_proj"], held["down_proj"], strict=True))
        if activation is None or not all(isinstance(part.linear, PackedLinear) for pair in pairs for part in pair):
            return None
        experts = [(up.linear, down.linear) for up, down in pairs]
        mixture = NativeMixture(*self._place, experts, activation, is_gated, self._attentions.threads)

        def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return mixture(x.contiguous(), chosen.long().contiguous(), weights.float().contiguous())

        return forward if self._agrees(forward, call) else None

    def _attention(self, module: Any, call: _Call) -> Callable[..., Any] | None:
        index, angles = self._host.index_of(module), call.given.get("position_embeddings")
        parts = _parts(module, _QKV, _OUT, ("q_norm", "k_norm"))
        if index is None or parts is None or not _are_angles(angles) or "hidden_states" not in call.given:
            return None
        assert isinstance(angles, tuple)
        layer = self._host.layers[index]
        if (layer.key_dim, layer.value_dim, layer.kv_heads) != (self._host.dim, self._host.dim, self._host.kv_heads):
            return None
        norms = [self._norms.get(id(getattr(module, name, None))) for name in ("q_norm", "k_norm")]
        if [norm is not None for norm in norms] != [hasattr(module, name) for name in ("q_norm", "k_norm")]:
            return None
        eps = {norm.eps for norm in norms if norm is not None}
        if len(eps) > 1 or (eps and None in norms):
            return None
        first, second = norms
        weights = None if first is None or second is None else (first.weight, second.weight)
        for is_interleaved, once in _ROTARY:
            rotary_dim = 2 * once(angles[0]).shape[-1]
            native = self._attentions.of_layer(index)
            whole = NativeAttentionModule(
                *self._place, native, *parts, weights, max(eps, default=0.0), rotary_dim, is_interleaved
            )
            forward = self._attending(whole, index, once)
            if self._agrees(forward, call):
                return forward
        return None

    def _attending(
        self, whole: NativeAttentionModule, index: int, once: Callable[[Tensor], Tensor]
    ) -> Callable[..., Any]:
        def forward(
            hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any
        ) -> tuple[Tensor, None]:
            cos, sin = self._angles_of(position_embeddings, once)
            x = hidden_states[0].contiguous()
            return whole(x, cos, sin, self._attentions.rows, index)[None], None

        return forward

    def _angles_of(self, tables: tuple[Tensor, Tensor], once: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        key = id(tables[0])
        if key not in self._angles:
            self._tables.append(tables[0])
            cos, sin = (once(table[0]).float().contiguous() for table in tables)
            self._angles[key] = cos, sin
        return self._angles[key]

    def _agrees(self, forward: Callable[..., Any], call: _Call) -> bool:
        self.begin()
        own, expected = forward(*call.args, **call.given), call.result
        if isinstance(expected, tuple):
            if (
                not isinstance(own, tuple)
                or len(expected) != len(own)
                or any(part is not None for part in expected[1:])
            ):
                return False
            own, expected = own[0], expected[0]
        elif isinstance(own, tuple):
            return False
        if own.shape != expected.shape or own.dtype != expected.dtype:
            return False
        size, difference = expected.double().norm(), (own.double() - expected.double()).norm()
        return bool(0 < size and difference <= _TOLERANCE[own.dtype] * size)  # a call without tokens proves nothing

    @property
    def _place(self) -> tuple[CDLL, Scratch]:
        return self._attentions.library, self._attentions.scratch


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[int, _Call]]:
    """The first call of each module, by the module's id."""
    calls: dict[int, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> None:
        if id(module) not in calls:
            kept = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
            calls[id(module)] = _Call(kept, given, result)

    hooks = [each.register_forward_hook(record, with_kwargs=True) for each in model.modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _parts(
    module: nn.Module, firsts: Sequence[Sequence[str]], seconds: Sequence[str], others: Sequence[str] = ()
) -> tuple[PackedLinear, PackedLinear] | None:
    """The product that `module` begins with, and the one that it ends with, if it has no parts beside these and `others`."""
    for names in firsts:
        first = _as_one([getattr(module, name, None) for name in names])
        for name in seconds:
            second = getattr(module, name, None)
            if first is None or not isinstance(second, EngineLinear) or not isinstance(second.linear, PackedLinear):
                continue
            if not _has(module, (*names, name, *others)):
                return first, second.linear
    return None


def _as_one(layers: Sequence[Any]) -> PackedLinear | None:
    """The product of linear layers that read the same input, one after the other."""
    first = layers[0]
    if len(layers) > 1 and not FusedLinear.are_all_of_one(layers):
        return None
    is_packed = isinstance(first, EngineLinear) and isinstance(first.linear, PackedLinear)
    return first.linear if is_packed else None


def _has(module: nn.Module, names: Iterable[str]) -> bool:
    """True if a module has children with parameters beside `names`. Functions without parameters, such as an
    activation, are found by trying."""
    return any(
        name not in names and (any(True for _ in child.parameters()) or isinstance(child, EngineLinear))
        for name, child in module.named_children()
    )


def _takes_adapters(module: nn.Module) -> bool:
    """True if LoRA adapters may change a linear layer of the module."""
    return any(isinstance(part, EngineLinear) and part.product[0].adapt is not None for part in module.modules())


def _has_thresholds(kind: Any) -> bool:
    codes = (getattr(getattr(kind, name, None), "__code__", None) for name in ("forward", "_apply_gate"))
    return any(code is not None and _THRESHOLDS & set(code.co_names) for code in codes)


def _eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(eps := getattr(module, name, None), float):
            return eps
    return None


def _activation_of(module: Any) -> str | None:
    """The entry of kernels.cpu.structs.ACTIVATIONS whose values a module's activation function has."""
    function = next((f for f in (getattr(module, name, None) for name in ("act_fn", "activation_fn")) if f), None)
    if not callable(function):
        return None
    x = torch.linspace(-40.0, 40.0, 641)
    known = {"silu": nn.functional.silu(x), "gelu": nn.functional.gelu(x)}
    known["gelu_tanh"] = nn.functional.gelu(x, approximate="tanh")
    try:
        own = function(x)
    except Exception:  # a function of another kind of input
        return None
    names = [
        name for name, y in known.items() if isinstance(own, Tensor) and torch.allclose(own, y, rtol=1e-6, atol=1e-6)
    ]
    return names[0] if names else None


def _are_angles(angles: Any) -> bool:
    if not isinstance(angles, tuple) or len(angles) != 2:
        return False
    return all(isinstance(table, Tensor) and table.dim() == 3 and len(table) == 1 for table in angles)
