"""What TensorRT-LLM's LLM API and its executor bindings share: the fields of their common configuration objects, and tensors.

Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.api.foreign import honoured, refused
from backend.api.tensor import TensorData

if TYPE_CHECKING:
    from torch import Tensor

# fields of a PeftCacheConfig
PEFT_CACHE = tuple(
    honoured(f"peft_cache_config.{field}", f"lora.{name}")
    for field, name in {
        "max_adapter_size": "max_rank",
        "host_cache_size": "host_bytes",
        "device_cache_percent": "device_fraction",
        "num_host_module_layer": "host_module_layers",
        "num_device_module_layer": "device_module_layers",
        "optimal_adapter_size": "page_rank",
        "max_pages_per_block_host": "host_pages_per_block",
        "max_pages_per_block_device": "device_pages_per_block",
        "num_put_workers": "put_workers",
        "num_ensure_workers": "ensure_workers",
        "num_copy_streams": "copy_streams",
        "lora_prefetch_dir": "prefetch_dir",
    }.items()
)
# fields of a DynamicBatchConfig
_BATCH = "scheduler_config.dynamic_batch_config"
DYNAMIC_BATCH = (
    honoured(f"{_BATCH}.enable_batch_size_tuning", "scheduler.enable_batch_size_tuning"),
    honoured(f"{_BATCH}.enable_max_num_tokens_tuning", "scheduler.enable_max_num_tokens_tuning"),
    honoured(f"{_BATCH}.dynamic_batch_moving_average_window", "scheduler.tuning_requests"),
)
# fields of a KvCacheConfig
KV_CACHE = (
    honoured("kv_cache_config.enable_block_reuse", "kv_cache.enable_block_reuse"),
    honoured("kv_cache_config.enable_partial_reuse", "kv_cache.enable_partial_reuse"),
    honoured("kv_cache_config.max_tokens", "kv_cache.max_tokens"),
    honoured("kv_cache_config.free_gpu_memory_fraction", "kv_cache.free_memory_fraction"),
    honoured(
        "kv_cache_config.sink_token_length", "kv_cache.sink_tokens", "all tokens attend to them besides the window"
    ),
    honoured(
        "kv_cache_config.host_cache_size", "kv_cache.host_cache_bytes", "KV beside the pool (docs/second-level.md)"
    ),
    honoured(
        "kv_cache_config.onboard_blocks", "kv_cache.onboard_blocks", "False: such KV is written and not read back"
    ),
    honoured("kv_cache_config.secondary_offload_min_priority", "kv_cache.secondary_offload_min_priority"),
    *refused("only decoder models are served", "kv_cache_config.cross_kv_cache_fraction"),
    *refused("the KV cache lies in plain device memory", "kv_cache_config.use_uvm"),
    *refused(
        "the size comes from max_tokens or free_gpu_memory_fraction",
        "kv_cache_config.max_gpu_total_bytes",
        neutral=(0,),
    ),
)


def as_tensor(data: TensorData) -> Tensor:
    """A tensor of its own memory, in the dtype that the data names."""
    import torch

    dtype = torch.int32 if data.dtype == "int32" else torch.float32
    if not data.data:
        return torch.empty(data.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).reshape(data.shape)


def as_data(tensor: Tensor) -> TensorData:
    """A copy of a tensor of any type and device, in float32."""
    return TensorData("float32", tuple(tensor.shape), tensor.detach().float().cpu().contiguous().numpy().tobytes())
