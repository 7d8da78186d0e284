"""Meaning of sampling fields that a client leaves out, by the rule of a protocol. docs/sampling.md lists the rules of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backend.api.sampling import SamplingConfig
from backend.api.sampling_fields import SAMPLING_FIELDS

_ZERO_IS_UNSET = frozenset(field.name for field in SAMPLING_FIELDS if field.excludes_zero)
_UNSET = {field.name: field.unset for field in SAMPLING_FIELDS if field.unset is not None}


def tensorrt_llm_sampling(**fields: Any) -> SamplingConfig:
    """The rule of TensorRT-LLM and TurboMind: without top-k, top-p and min-p (0 is none) decoding is greedy, whatever the
    temperature. Nothing is checked here, and the temperature stays, so that one out of its limits is refused as everywhere.
    """
    given: dict[str, Any] = {name: value for name, value in fields.items() if name not in _ZERO_IS_UNSET or value != 0}
    config = SamplingConfig(**given)
    if config.is_greedy or config.cuts_distribution:
        return config
    return msgspec.structs.replace(config, top_k=1)


def without_unset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those whose value TensorRT-LLM's clients send for "unset", or a smaller one."""
    return {name: value for name, value in fields.items() if name not in _UNSET or value > _UNSET[name]}
