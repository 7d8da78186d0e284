"""What sampling fields mean that a client leaves out, by the rule of a protocol. docs/sampling.md lists the rules of all."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.api.sampling import SamplingConfig

_ZERO_IS_UNSET = ("top_p", "top_p_decay", "top_p_min")


def tensorrt_llm_sampling(**fields: Any) -> SamplingConfig:
    """The rule of TensorRT-LLM and TurboMind: without top_k, top_p and min_p (0 is none) decoding is greedy, whatever the
    temperature. Nothing is checked here, and the temperature stays, so that one out of its limits is refused as everywhere.
    """
    given: dict[str, Any] = {name: value for name, value in fields.items() if name not in _ZERO_IS_UNSET or value != 0}
    config = SamplingConfig(**given)
    if config.is_greedy or config.top_k or config.top_p or config.min_p:
        return config
    return msgspec.structs.replace(config, top_k=1)
