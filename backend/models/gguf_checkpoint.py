"""A GGUF file as a Hugging Face checkpoint: floats under the names, and in the fused or separate projections, of its family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend.api.checkpoint.gguf import GgufHeader, TokenId
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig, RopeConfig, StackedExperts
from backend.architectures.gguf.names import as_stored
from backend.layers.rotary import inverse_frequencies
from backend.models.config import of_object
from backend.models.gguf import GgufTensors, raw_config

# The scalings of published models of Llama 3.1 and after. A file holds the divisors of frequencies that follow from one of them,
# and not its numbers.
_LLAMA3: list[dict[str, Any]] = [
    dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    for factor in (8.0, 16.0, 32.0, 40.0)
]


class _Made(NamedTuple):
    """A tensor of the checkpoint, and those of the file that it is made of."""

    sources: list[str]
    make: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: torch.cat(list(tensors))


class GgufCheckpoint(Mapping[str, Tensor]):
    """The tensors of a file by the names of its family's checkpoints. Raises ConfigError."""

    def __init__(self, header: GgufHeader) -> None:
        content = {key: value for key, value in raw_config(header).items() if value is not None}
        self.family = of_object(content)
        kept = {"recurrent layers": self.family.recurrence, "latent attention": self.family.latent}
        if has := next((what for what, of in kept.items() if of is not None), None):
            raise ConfigError(
                f"{header.name}: a model with {has} is not converted to a checkpoint; serve the file as it is"
            )
        self.stored = as_stored(self.family, header)
        self._tensors = GgufTensors(header, self.stored)
        self._made = dict(self._projections())
        if self.family.experts is not None:
            self._made |= self._of_experts()
        rope = _rope(content["rope_parameters"], self.family)
        padding = header.get("tokenizer.ggml.padding_token_id", TokenId)
        self.config = content | dict(
            pad_token_id=padding, model_type=_model_type(content["architectures"][0]), rope_parameters=rope
        )

    @property
    def has_own_rope(self) -> bool:
        """True if rope_parameters are of a kind that only this server reads."""
        return bool(self.config["rope_parameters"].get("rope_type") == "factors")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            return self._tensors[name]
        return self._made[name].make([self._tensors[each] for each in self._made[name].sources])

    def __iter__(self) -> Iterator[str]:
        taken = {each for made in self._made.values() for each in made.sources}
        yield from (name for name in self._tensors if name not in taken)
        yield from self._made

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _projections(self) -> Iterator[tuple[str, _Made]]:
        """Each projection that the file fuses otherwise, or in another order."""
        config, names, stored = self.family, self.family.names, self.stored.names.layer
        q, kv, inter = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.intermediate_size,
        )
        groups = ((names.layer.qkv, stored.qkv, (q, kv, kv)), (names.layer.gate_up, stored.gate_up, (inter, inter)))
        for wanted, given, sizes in groups:
            if wanted == given and not (names.layer.qkv_by_head and wanted is names.layer.qkv):
                continue
            ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
            spans = [slice(end - size, end) for end, size in zip(ends, sizes)] if len(wanted) > 1 else [slice(None)]
            for index in range(config.num_layers):
                for suffix in ("weight", "bias"):
                    of_file = [f"{names.layers}{index}.{each}.{suffix}" for each in given]
                    if of_file[0] in self._tensors:
                        for each, span in zip(wanted, spans, strict=True):
                            by_head = config.num_heads if names.layer.qkv_by_head and wanted is names.layer.qkv else 0
                            yield (
                                f"{names.layers}{index}.{each}.{suffix}",
                                _Made(of_file, partial(_rows, span, by_head)),
                            )

    def _of_experts(self) -> Iterator[tuple[str, _Made]]:
        """The tensors of layers with experts that have another name in the family, or hold all experts."""
        for index, layer in enumerate(self.family.layers):
            prefix = f"{self.family.names.layers}{index}."
            sinks = (self.stored.names.layer.sinks, self.family.names.layer.sinks)
            if self.family.block.attention_sinks and sinks[0] != sinks[1]:
                yield prefix + sinks[1], _Made([prefix + sinks[0]])
            for name, made in self._of_mixture() if layer.has_experts else ():
                yield prefix + name, made._replace(sources=[prefix + each for each in made.sources])

    def _of_mixture(self) -> Iterator[tuple[str, _Made]]:
        experts, ours, stored = self.family.experts, self.family.names.layer, self.stored.names.layer
        assert experts is not None
        if experts.has_choice_bias:
            yield ours.choice_bias, _Made([stored.choice_bias])
        if experts.shared:
            groups = ((ours.shared_gate_up, stored.shared_gate_up), ((ours.shared_down,), (stored.shared_down,)))
            yield from _fused("", groups, ".weight")
        of_each = (stored.expert_gate_up, (stored.expert_down,))
        if (stacked := ours.stacked) is None:
            for expert in range(experts.count):
                groups = ((ours.expert_gate_up, of_each[0]), ((ours.expert_down,), of_each[1]))
                yield from _fused(f"{expert}.", groups, ".weight", ours.experts, stored.experts)
            return
        whole = ((stacked.gate_up, stacked.down, ".weight"), (stacked.gate_up_bias, stacked.down_bias, ".bias"))
        for *names, suffix in whole[: 1 + experts.has_bias]:
            for name, parts in zip(names, of_each, strict=True):
                of_file = [
                    f"{stored.experts}{expert}.{part}{suffix}" for expert in range(experts.count) for part in parts
                ]
                yield name, _Made(of_file, partial(_stacked, stacked, len(parts)))


def _fused(
    each: str, groups: Iterable[tuple[tuple[str, ...], tuple[str, ...]]], suffix: str, ours: str = "", stored: str = ""
) -> Iterator[tuple[str, _Made]]:
    """Projections that the family has in as many tensors as the file, or in one."""
    for wanted, given in groups:
        of_file = [f"{stored}{each}{part}{suffix}" for part in given]
        for name, sources in zip(wanted, [of_file] if len(wanted) == 1 else [[one] for one in of_file], strict=True):
            yield f"{ours}{each}{name}{suffix}", _Made(sources)


def _stacked(form: StackedExperts, parts: int, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors of an expert after another's, each in so many parts -> one of all experts."""
    whole = torch.stack(list(tensors)).unflatten(0, (-1, parts))  # [experts, parts, n, k], or [experts, parts, n]
    rows: Tensor = (whole.transpose(1, 2) if form.is_interleaved else whole).flatten(1, 2)
    return rows.transpose(1, 2).contiguous() if form.is_transposed and rows.dim() > 2 else rows


def _rows(rows: slice, heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """Some rows of tensors one below the other. heads: query, key and value of each follow one another then; 0: they do not."""
    whole = torch.cat(list(tensors))[rows]
    by_head: Tensor = whole.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2) if heads else whole
    return by_head


def _model_type(architecture: str) -> str:
    """The key by which transformers finds the family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    return found[architecture]


def _rope(rope: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Llama 3's scaling by its own name, where the divisors are those of a known set."""
    if rope.get("rope_type") != "factors":
        return rope
    plain = inverse_frequencies(RopeConfig(rope["rope_theta"]), config.head_dim)
    for known in _LLAMA3:
        divisors = plain / inverse_frequencies(RopeConfig(rope["rope_theta"], "llama3", **known), config.head_dim)
        if torch.allclose(divisors, torch.tensor(rope["factors"]), rtol=1e-5):
            scaling = {key.replace("max_position", "max_position_embeddings"): value for key, value in known.items()}
            return dict(rope_type="llama3", rope_theta=rope["rope_theta"], **scaling)
    return rope
