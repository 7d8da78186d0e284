"""LoraConfig: the adapter that a request runs with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from backend.api.checkpoint.model_files import read_object, shown
from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.api.tensor import TensorData

UINT64 = 1 << 64
ADAPTER_CONFIG = "adapter_config.json"  # in the directory of a PEFT adapter
CONFIG_ROWS = "model.lora_config.npy"  # in a directory that TensorRT-LLM's hf_lora_convert.py has written
# Keys of adapter_config.json -> the values with which an adapter is plain LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "target_parameters": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    # The others change the base model's weights: PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA. PEFT can convert such an adapter.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
MAX_NAME_SHOWN = 256
DTYPES = ("float16", "bfloat16", "float32")  # allowed for weights in a request


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An adapter, known by `task_id` within the client's namespace. Its weights come with the first use, later the id is enough.

    `weights` [rows, width]: each row is one projection of one layer, A [rank, k] and behind it B [n, rank], both in C order,
    filled up with anything; the factor alpha / rank is part of B. `config`: for each row its module id, layer and rank, and
    perhaps a 1 for DoRA, which is refused. `path`: instead of both a PEFT directory on the engine's machine.
    `name`: the client's name for it, used in errors; empty: its task id.
    `content`: hash of the weights, set by the engine; a client's value is overwritten.

    After TensorRT-LLM's LoraConfig.
    """

    task_id: int
    weights: TensorData | None = None
    config: tuple[tuple[int, ...], ...] = ()
    path: str = ""
    name: str = ""
    content: str = ""

    @property
    def brings_weights(self) -> bool:
        return self.weights is not None or bool(self.path)

    @property
    def shown(self) -> str:
        """The adapter's name in error messages."""
        return repr(self.name[:MAX_NAME_SHOWN]) if self.name else str(self.task_id)


def check_lora(lora: LoraConfig, is_enabled: bool) -> None:
    """Raise InvalidRequest (or Unsupported) for errors that can be found without the model."""
    if not is_enabled:
        raise Unsupported(
            f"LoRA is not enabled, the request asks for adapter {lora.shown}; set lora.enabled=true (in the LLM API "
            f"enable_lora=True, in ExecutorConfig a peft_cache_config), or leave it out"
        )
    if not 0 <= lora.task_id < UINT64:
        raise InvalidRequest(f"lora task id {lora.task_id} is no unsigned 64-bit number")
    weights = lora.weights
    if weights is None:
        if lora.config:
            raise InvalidRequest("lora_config is given without lora_weights; give both, or the id alone")
        return
    if lora.path:
        raise InvalidRequest("an adapter is given as weights and as a path; leave one out")
    if not lora.config:
        raise InvalidRequest("lora_weights are given without lora_config; give both, or the id alone")
    if weights.dtype not in DTYPES:
        raise InvalidRequest(f"lora_weights are {weights.dtype}, one of {', '.join(DTYPES)} is needed")
    if len(weights.shape) != 2 or weights.shape[0] != len(lora.config) or weights.shape[1] < 1:
        raise InvalidRequest(
            f"lora_weights have shape {list(weights.shape)}, [{len(lora.config)}, numbers of the widest row] is needed: a row "
            f"for each one of lora_config"
        )
    num_bytes = weights.shape[0] * weights.shape[1] * (4 if weights.dtype == "float32" else 2)
    if len(weights.data) != num_bytes:
        raise InvalidRequest(f"lora_weights have {len(weights.data)} bytes, their shape needs {num_bytes}")


def read_peft_config(directory: Path) -> dict[str, Any]:
    """Read adapter_config.json of a plain LoRA adapter. Raises ConfigError without one, Unsupported for another kind."""
    raw = read_object(directory, ADAPTER_CONFIG)
    if raw is None:
        raise ConfigError(
            f"{shown(directory.name)}: {ADAPTER_CONFIG}: File does not exist; put a PEFT adapter there, or name another one"
        )
    for key, plain in _PLAIN.items():
        if raw.get(key) not in plain:
            raise Unsupported(
                f"{ADAPTER_CONFIG}: {key} is {shown(raw.get(key))}, which is not served; train a plain LoRA adapter"
            )
    return raw
