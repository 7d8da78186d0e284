"""Models that read each text as a whole (encoders): what follows for the configuration, and for requests.

A token attends to what is behind it as well. So a text runs whole in one step, nothing of it can be computed before the rest is
known, and the KV of a common prefix is of no use to another text.
"""

from __future__ import annotations

from msgspec.structs import replace

from backend.api.config.schema import EngineConfig
from backend.core.step import ModelInfo


def with_whole_texts(config: EngineConfig, model: ModelInfo) -> EngineConfig:
    """The configuration with what the model needs: no chunks, no reuse of KV, and blocks for as many texts as there are slots."""
    if not model.reads_whole_texts:
        return config
    scheduler = replace(config.scheduler, enable_chunked_context=False, enable_max_num_tokens_tuning=False)
    slots = scheduler.max_batch_size
    kv_cache = replace(config.kv_cache, enable_block_reuse=False, watermark=0.0)
    kv_cache = replace(kv_cache, max_tokens=None, free_memory_fraction=None, num_slots=slots)
    return replace(config, scheduler=scheduler, kv_cache=kv_cache)
