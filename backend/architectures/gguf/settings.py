"""GgufSettings: what a GGUF file says of its architecture. A key that changes what a model computes is read, or refused."""

from __future__ import annotations

from typing import Any, TypeVar

from backend.api.checkpoint.gguf import GgufHeader
from backend.api.checkpoint.model_files import convert, shown
from backend.api.errors import ConfigError

T = TypeVar("T")
# Keys that change what the model computes, with the values that change nothing. A family that reads one takes any value.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0, 1),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0,),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (),
    "expert_shared_count": (0,),
    "rope.freq_base_swa": (),
}


class GgufSettings:
    """The settings of one architecture, by their names without it."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header, self.architecture, self._prefix = header, architecture, architecture + "."
        self._read: set[str] = set()

    def get(self, key: str, kind: type[T]) -> T | None:
        self._read.add(key)
        return self.header.get(self._prefix + key, kind)

    def need(self, key: str, kind: type[T]) -> T:
        self._read.add(key)
        return self.header.need(self._prefix + key, kind)

    def uniform(self, key: str, kind: type[T], skips_zeros: bool = False) -> T:
        """Like `need`, of a number that may be written once for each layer. Raises ConfigError if they differ.

        skips_zeros: some layers may lack what is counted.
        """
        given: Any = self.need(key, Any)
        if not isinstance(given, list):
            return self.need(key, kind)
        if skips_zeros and all(isinstance(each, int) for each in given):
            given = [each for each in given if each]
        values = convert(given, list[kind], self.header.name, self._prefix + key)  # type: ignore[valid-type]
        if len(set(values)) != 1:
            raise self.unsupported(key, f"{shown(values)}, and differs between layers")
        return values[0]

    def has_tensor(self, name: str) -> bool:
        """True if the first layer has the tensor, such as `attn_q.bias`."""
        return f"blk.0.{name}" in self.header.tensors

    def rows_of(self, name: str) -> int | None:
        """The rows of such a tensor in the first layer that has one; None where there is none."""
        found = (place.shape[0] for each, place in self.header.tensors.items() if each.endswith(f".{name}"))
        return next(found, None)

    def unsupported(self, key: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self.header.name}: {self._prefix}{key} is {shown(value)}, which is not supported; use another model"
        )

    def check_neutral(self) -> None:
        """Raise ConfigError for a setting that changes the model's results and was not read."""
        for key, values in _NEUTRAL.items():
            if key in self._read:
                continue
            value = self.header.get(self._prefix + key, Any)
            if value is not None and value not in values:
                raise self.unsupported(key, value)
        sections = self.header.get(self._prefix + "rope.dimension_sections", list[int]) or []
        if any(sections[1:]) and "rope.dimension_sections" not in self._read:
            raise self.unsupported("rope.dimension_sections", f"{shown(sections)}, as of models that read images")
