"""The configuration of an engine that serves one Python program."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, LimitsConfig, ModelConfigSection

# Any number of prompts may wait for any time, and each may ask for logits. A program is a single client: its requests share KV
# token by token, and results report reuse.
PROGRAM = EngineConfig(
    model=ModelConfigSection(gather_context_logits=True, gather_generation_logits=True),
    kv_cache=KvCacheConfig(sharing="all"),
    limits=LimitsConfig(max_queue_size=1 << 31, max_queued_tokens=1 << 48, default_timeout_s=1e9),
)


def with_model(config: EngineConfig, model: Any) -> EngineConfig:
    """The configuration with another checkpoint; None keeps the one that it names."""
    return config if model is None else with_model_fields(config, path=str(model))


def with_model_fields(config: EngineConfig, **fields: Any) -> EngineConfig:
    """The configuration with other fields of its section `model`."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **fields))
