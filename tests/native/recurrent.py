"""Small models with recurrent layers for the native step, the same models as naive loops, and sequences that steps run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.common.kv_format import PLAIN
from kernels.cpu.decoder import NativeDecoder, NativeForm, NativeLayer, NativeNorm, NativeShape
from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from kernels.cpu.recurrence import NativeRecurrence, NativeStates
from tests.native.harness import threads

HIDDEN, INTERMEDIATE, VOCAB, MAX_LEN, BLOCK, SLOTS, STATES, EPS = 72, 80, 50, 96, 32, 6, 12, 1e-5
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 20


@dataclass(frozen=True)
class Mixer:
    """The sizes of a recurrent layer."""

    kind: str
    taps: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    groups: int = 1  # of the norm of `sum`; 0: there is no norm
    has_bias: bool = False
    gates_first: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def results(self) -> int:
        return HIDDEN if self.kind == "convolution" else self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return HIDDEN if self.kind == "convolution" else 2 * self.keys + self.results

    @property
    def at(self) -> tuple[int, int, int]:
        """The first channels of queries, keys and values."""
        if self.kind == "sum":
            return self.results + self.keys, self.results, 0
        return 0, self.keys, 2 * self.keys


MIXERS = {
    "delta": Mixer("delta", 4, 2, 4, 24, 40),
    "delta_of_whole_slices": Mixer("delta", 4, 2, 2, 32, 64),
    "delta_of_odd_sizes": Mixer("delta", 2, 1, 3, 33, 13, groups=0, has_bias=True),
    "sum": Mixer("sum", 3, 1, 6, 20, 12, groups=2, has_bias=True, gates_first=True),
    "sum_of_whole_slices": Mixer("sum", 4, 2, 4, 16, 32, groups=4),
    "convolution": Mixer("convolution", 3, has_bias=True),
}


class Model:
    """layers: a Mixer each, or None for attention."""

    def __init__(
        self, layers: Sequence[Mixer | None], gates_attention: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self.layers, self.gates_attention, self.dtype = layers, gates_attention, dtype
        self._rng = torch.Generator().manual_seed(len(layers))
        self.weights = [self._layer(mixer) for mixer in layers]
        self.embedding, self.head = self._random(VOCAB, HIDDEN), self._matrix(VOCAB, HIDDEN)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._rng).to(self.dtype)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=self._rng) * columns**-0.5).to(self.dtype)

    def _layer(self, mixer: Mixer | None) -> dict[str, Tensor]:
        made = {"norm": self._random(HIDDEN).float(), "gate_up": self._matrix(2 * INTERMEDIATE, HIDDEN)}
        made["down"], made["mlp_norm"] = self._matrix(HIDDEN, INTERMEDIATE), self._random(HIDDEN).float()
        if mixer is None:
            rows = (HEADS * (2 if self.gates_attention else 1) + 2 * KV_HEADS) * HEAD_DIM
            return made | {"qkv": self._matrix(rows, HIDDEN), "out": self._matrix(HIDDEN, HEADS * HEAD_DIM)}
        made["out"], made["weights"] = (
            self._matrix(HIDDEN, mixer.results),
            self._random(mixer.taps, mixer.channels).float(),
        )
        if mixer.has_bias:
            made["bias"] = self._random(mixer.channels).float()
        if mixer.kind == "convolution":
            return made | {"inputs": self._matrix(3 * HIDDEN, HIDDEN)}
        is_delta, heads = mixer.kind == "delta", mixer.value_heads
        made["inputs"] = self._matrix(mixer.channels + mixer.results, HIDDEN)
        made["gates"] = self._matrix(heads * (2 if is_delta else 1), HIDDEN)
        made["rate"], made["dt_bias"] = self._random(heads).float().exp() * 0.3, self._random(heads).float()
        if not is_delta:
            made["skip"] = self._random(heads).float()
        if mixer.groups:
            made["result_norm"] = self._random(mixer.value_dim if is_delta else mixer.results).float()
        return made

    def decoder(self, library: CDLL, form: NativeForm | None = None) -> NativeDecoder:
        arena = Arena()
        packed = lambda weight: PackedLinear.of_floats(library, arena, weight)
        layers = []
        for mixer, of in zip(self.layers, self.weights, strict=True):
            linears = {name: packed(of[name]) if name in of else None for name in ("qkv", "out", "gate_up", "down")}
            norms = NativeNorm(of["norm"]), NativeNorm(of["mlp_norm"])
            layers.append(NativeLayer(*linears.values(), *norms, recurrence=mixer and _native(mixer, of, packed)))
        shape = NativeShape(HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, BLOCK, PLAIN, MAX_LEN)
        norm, form = NativeNorm(torch.ones(HIDDEN)), form or NativeForm(EPS, gates_attention=self.gates_attention)
        return NativeDecoder(library, shape, form, self.embedding, layers, norm, packed(self.head))

    def reference(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor | None]]:
        """Logits of all tokens, and the layers' states behind the last one; in float64, by loops over tokens."""
        x = self.embedding[list(ids)].double()
        states: list[Tensor | None] = []
        for mixer, weights in zip(self.layers, self.weights, strict=True):
            of = {name: tensor.double() for name, tensor in weights.items()}
            normed = _rms(x, of["norm"])
            result, state = (
                (_attend(normed, of, self.gates_attention), None) if mixer is None else _mix(mixer, normed, of)
            )
            states.append(state)
            x = x + result @ of["out"].T
            gate, up = (_rms(x, of["mlp_norm"]) @ of["gate_up"].T).chunk(2, dim=-1)
            x = x + (_silu(gate) * up) @ of["down"].T
        return _rms(x, torch.ones(HIDDEN)) @ self.head.double().T, states


def _native(mixer: Mixer, of: dict[str, Tensor], packed: Callable[[Tensor], PackedLinear]) -> NativeRecurrence:
    if mixer.kind == "convolution":
        return NativeRecurrence("convolution", packed(of["inputs"]), of["weights"], of.get("bias"))
    return NativeRecurrence(
        mixer.kind,
        packed(of["inputs"]),
        of["weights"],
        of.get("bias"),
        packed(of["gates"]),
        *(mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim),
        *mixer.at,
        mixer.key_dim**-0.5,
        *(of["rate"], of["dt_bias"], of.get("skip")),
        *(DT_RANGE if mixer.kind == "sum" else ()),
        norm=of.get("result_norm"),
        norm_size=mixer.value_dim if mixer.kind == "delta" else mixer.results // max(1, mixer.groups),
        gates_first=mixer.gates_first,
    )


DT_RANGE = 0.4, 1.1


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _attend(x: Tensor, of: dict[str, Tensor], is_gated: bool) -> Tensor:
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, *([HEADS * HEAD_DIM] if is_gated else [])]
    q, k, v, *gate = (x @ of["qkv"].T).split(sizes, dim=-1)
    results = []
    for h in range(HEADS):
        own, shared = (slice(i * HEAD_DIM, (i + 1) * HEAD_DIM) for i in (h, h // (HEADS // KV_HEADS)))
        scores = (q[:, own] @ k[:, shared].T) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        results.append(scores.softmax(-1) @ v[:, shared])
    result = torch.cat(results, dim=-1)
    return result * gate[0].sigmoid() if is_gated else result


def _mix(mixer: Mixer, x: Tensor, of: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mixer's results for all tokens, and the state behind them."""
    y = x @ of["inputs"].T
    u, gate = y[:, : mixer.channels], y[:, mixer.channels :]
    if mixer.kind == "convolution":
        gate = y[:, HIDDEN : 2 * HIDDEN]
        u = u * y[:, 2 * HIDDEN :]
    window = [torch.zeros(mixer.channels, dtype=torch.float64)] * (mixer.taps - 1)
    state = torch.zeros(mixer.value_heads, mixer.key_dim, mixer.value_dim, dtype=torch.float64)
    raw = x @ of["gates"].T if "gates" in of else x
    results = []
    for t in range(len(x)):
        inputs = [*window, u[t]]
        c = sum(inputs[j] * of["weights"][j] for j in range(mixer.taps)) + of.get("bias", 0)
        window = inputs[1:]
        results.append(
            gate[t] * c if mixer.kind == "convolution" else _of_token(mixer, _silu(c), raw[t], gate[t], state, of)
        )
    return torch.stack(results), torch.cat([*window, state.flatten()])


def _of_token(mixer: Mixer, c: Tensor, raw: Tensor, gate: Tensor, state: Tensor, of: dict[str, Tensor]) -> Tensor:
    """Changes the state."""
    is_delta, heads, (query_at, key_at, value_at) = mixer.kind == "delta", mixer.value_heads, mixer.at
    queries, keys = (c[at : at + mixer.keys].view(mixer.key_heads, -1) for at in (query_at, key_at))
    values = c[value_at : value_at + mixer.results].view(heads, -1)
    results = []
    for h in range(heads):
        q, k = (of_keys[h // (heads // mixer.key_heads)] for of_keys in (queries, keys))
        dt = torch.log1p((raw[h] + of["dt_bias"][h]).exp())
        if is_delta:
            q, k = (each / (each.square().sum() + 1e-6).sqrt() for each in (q, k))
            q = q * mixer.key_dim**-0.5
        else:
            dt = dt.clamp(*DT_RANGE)
        state[h] *= (-of["rate"][h] * dt).exp()
        e = (values[h] - k @ state[h]) * raw[heads + h].sigmoid() if is_delta else values[h] * dt
        state[h] += k[:, None] * e
        results.append(q @ state[h] if is_delta else q @ state[h] + of["skip"][h] * values[h])
    result = torch.cat(results)
    if "result_norm" not in of:
        return result * _silu(gate)
    if mixer.gates_first:
        result = result * _silu(gate)
    groups = result.view(heads if is_delta else mixer.groups, -1)
    normed = _rms(groups, of["result_norm"].view(1 if is_delta else mixer.groups, -1)).flatten()
    return normed if mixer.gates_first else normed * _silu(gate)


class Sequences:
    """Steps over slots whose token ids are fixed. States are numbered; those that no step has written are NaN."""

    def __init__(self, model: Model, library: CDLL) -> None:
        self.decoder = model.decoder(library)
        self.ids = torch.randint(VOCAB, (SLOTS, MAX_LEN), generator=torch.Generator().manual_seed(5))
        per_slot = MAX_LEN // BLOCK
        self.tables = np.arange(SLOTS * per_slot, dtype=np.int32).reshape(SLOTS, per_slot)
        block = self.decoder.kv_block_bytes
        self.pools = [
            torch.zeros(SLOTS * per_slot, block, dtype=torch.uint8) if mixer is None else None for mixer in model.layers
        ]
        sizes = [(m.taps - 1) * m.channels + m.value_heads * m.key_dim * m.value_dim if m else 0 for m in model.layers]
        self.states = [torch.full((STATES, size), torch.nan) if size else None for size in sizes]

    def step(
        self,
        rows: list[tuple[int, int, int]],  # slot, computed tokens, tokens to run
        state_rows: list[tuple[int, int, int]],
        saves: list[tuple[int, int, int]] = [],  # noqa: B006 (not written)
        num_threads: int = 2,
    ) -> list[Tensor]:
        """Logits of all tokens, of each row."""
        numbers = np.array([[*row, row[2]] for row in rows], dtype=np.int32)
        states = NativeStates(
            self.states, np.array(state_rows, dtype=np.int32), np.array(saves, dtype=np.int32).reshape(-1, 3)
        )
        with threads(num_threads):
            _, logits = self.decoder.step(numbers, self.ids, self.tables, self.pools, True, states=states)
        assert logits is not None
        return list(logits.split([row[2] for row in rows]))

    def state(self, number: int) -> Tensor:
        """Of all layers."""
        return torch.cat([pool[number] for pool in self.states if pool is not None])
