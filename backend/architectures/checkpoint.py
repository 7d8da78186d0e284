"""Examines a checkpoint's files before anything is loaded: is it supported and complete, and how large is it?"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from backend.api.checkpoint.gguf import GgufHeader, gguf_file, read_header
from backend.api.checkpoint.model_files import read_object, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.checkpoint.weight_files import tensor_shapes, weight_files
from backend.api.config.kv_bits import KV_BITS, kv_bits
from backend.api.config.schema import EngineConfig, Implementation, KvNumbers
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.architectures.gguf import held
from backend.architectures.gguf.config import config_of
from backend.architectures.hosted import ENCODERS, implementation_of, sizes_of
from backend.architectures.registry import HEADLESS, read_config
from backend.architectures.sizes import check_hosted_sizes, check_sizes

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PARAMETER_BYTES = 4  # parameters of one quantised key or value of a head, beside its numbers


class Checkpoint(Struct, frozen=True):
    """A supported checkpoint. `dtype`: float32, bfloat16 or float16; `kv_dtype`: the type of KV that it asks for."""

    architecture: str
    weight_bytes: int  # size of its files; of a GGUF file the memory that its tensors take
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    dtype: str
    kv_dtype: KvNumbers | None = None
    model: ModelConfig | None = None  # None for models that transformers runs
    is_hosted: bool = False  # transformers runs it

    @property
    def generates(self) -> bool:
        """False for encoders and for decoders without an output head, which make embeddings only."""
        return self.architecture not in ENCODERS and self.architecture not in HEADLESS

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all recurrent layers; 0: the model has none."""
        return 0 if self.model is None else self.model.state_bytes

    def max_seq_len(self, config: EngineConfig) -> int:
        """Tokens of one sequence."""
        return config.model.max_seq_len or self.max_position

    def kv_bytes_per_token(self, config: EngineConfig, *, on_cpu: bool) -> int:
        """Bytes of one token's KV in all layers. On a CPU float16 is computed in float32. Raises ConfigError (kv_bits)."""
        dtype = self.dtype if config.model.dtype == "auto" else config.model.dtype
        value_bytes = VALUE_BYTES["float32" if on_cpu and dtype == "float16" else dtype]
        of_both = (
            self.head_dim * value_bytes if bits == KV_BITS["auto"] else self.head_dim * bits // 8 + PARAMETER_BYTES
            for bits in kv_bits(config.kv_cache, self.kv_dtype)
        )
        num_layers = self.num_layers if self.model is None else self.model.num_kv_layers
        return num_layers * self.num_kv_heads * sum(of_both)


def examine(path: Path, implementation: Implementation = "auto") -> Checkpoint:
    """Look at a checkpoint directory or a GGUF file. Raises ConfigError where the model is not supported, or a file of it is
    missing, torn or refused. Of the tensors only the headers are read.
    """
    if (file := gguf_file(path)) is not None:
        return _of_gguf(read_header(file))
    content = read_object(path, FILE)
    if content is None:
        raise ConfigError(f"model {shown(path.name)}: {FILE} is missing; give a Hugging Face checkpoint directory")
    is_native = implementation_of(content, implementation) == "native"
    config = read_config(content) if is_native else None
    files = weight_files(path)
    shapes = {name: shape for each in files for name, shape in tensor_shapes(each).items()}
    if config is None:
        check_hosted_sizes(content, shapes)
        dtype = content.get("dtype") or content.get("torch_dtype")
        num_bytes = sum(each.stat().st_size for each in files)
        name = str(content["architectures"][0])
        own_dtype = _known_dtype(dtype if isinstance(dtype, str) else None)
        return Checkpoint(name, num_bytes, *sizes_of(content), own_dtype, is_hosted=True)
    check_sizes(config, shapes)
    return Checkpoint(
        config.architecture,
        sum(each.stat().st_size for each in files),
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        config.max_position,
        _known_dtype(config.dtype),
        config.kv_cache_dtype,
        config,
    )


def _of_gguf(header: GgufHeader) -> Checkpoint:
    content = config_of(header, {})
    held.check_sizes(header, content["num_hidden_layers"], content["hidden_size"])
    dtype = content["dtype"]
    model = read_config({key: value for key, value in content.items() if value is not None})
    return Checkpoint(
        model.architecture,
        held.memory_bytes(header, VALUE_BYTES["float32" if dtype == "float16" else dtype]),
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        model.max_position,
        dtype,
        model=model,
    )


def _known_dtype(name: str | None) -> str:
    """The dtype; float32 for an absent or unknown one, about which the engine decides."""
    name = (name or "float32").removeprefix("torch.")
    return name if name in VALUE_BYTES else "float32"
