"""Checkpoints: a Hugging Face directory (config.json, safetensors in one file or shards), the same in memory, or a GGUF file.

Of a directory safetensors only: a pickle-based file could run code while it is read, so it is refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from backend.api.checkpoint.gguf import eos_ids, gguf_file, read_header
from backend.api.checkpoint.gguf_parts import parts_of
from backend.api.checkpoint.hub import fetch
from backend.api.checkpoint.model_files import read_object, shown, token_ids
from backend.api.checkpoint.quantised import Fp8Format
from backend.api.checkpoint.weight_files import StoredTensor, tensor_places, weight_files
from backend.api.config.schema import Windows
from backend.api.errors import ConfigError
from backend.architectures.description import WHOLE, ModelConfig, Shard
from backend.architectures.registry import HEADLESS
from backend.architectures.shards import check_ranks, of_rank
from backend.architectures.sizes import check_layers
from backend.models import gguf
from backend.models.config import check_eos_ids, parse_model_config, read_model_config
from backend.models.decoder import Decoder, Follow, assemble, build_decoder
from backend.models.fp8 import Fp8Tensors
from backend.models.gguf import GgufTensors
from backend.models.linears import LinearOptions
from backend.models.mxfp4 import Mxfp4Layers
from backend.models.parts import Parts

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
GENERATION = "generation_config.json"
MAX_POSITIONS = 1 << 21  # at a head_dim of 128 the rotary tables then take 1 GiB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_model_path(path: str) -> Path:
    """A directory, a GGUF file, a Hugging Face hub id (fetched or found in the local cache), or "" for the default model.

    For a directory that holds a GGUF file instead of a checkpoint, that file is returned. Raises ConfigError.
    """
    if not path:
        return DEFAULT_MODEL
    try:
        if (file := gguf_file(Path(path))) is not None:
            return file
        if Path(path).is_dir():
            return Path(path)
        is_file = Path(path).exists()
    except OSError as error:  # too long a name, or a directory on the way that this user may not enter
        raise ConfigError(
            f"model {shown(path)}: cannot be looked up ({error.strerror}); give a checkpoint directory"
        ) from None
    if is_file:
        raise ConfigError(
            f"model {shown(path)}: is no directory and no GGUF file; give the directory of a checkpoint, or a GGUF file"
        )
    if Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") != 1 or not path.isprintable():
        raise ConfigError(
            f"model {shown(path)}: File does not exist; give a checkpoint directory or a hub id (ORG/NAME)"
        )
    return _from_hub(path)


class CheckpointReader:
    """A parsed config.json and the tensors that go with it. Nothing large is read before `build`."""

    is_encoder = False

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], files: Sequence[Path] = ()) -> None:
        """files: whose content determines configuration and tensors; none where the tensors are in memory already.

        Raises ConfigError when the configuration has more layers than the tensors have.
        """
        check_layers(config, tensors)
        self.files = tuple(files)
        # A checkpoint of the layers alone, as embedding models have it: the head that is built is not the model's.
        has_head = config.tied_embeddings or not isinstance(tensors, _BareTensors)
        self.is_fp8 = isinstance(config.quantization, Fp8Format)  # its weights have 8 bits, and are read as floats
        if isinstance(config.quantization, Fp8Format):
            config, tensors = replace(config, quantization=None), Fp8Tensors(tensors, config.quantization)
        self.has_head = has_head and config.architecture not in HEADLESS
        self.config = config if self.has_head else replace(config, tied_embeddings=True)
        self.tensors = tensors
        self.shard = WHOLE

    def limit_attention(self, windows: Windows | None, sink_tokens: int) -> None:
        """Windows and sink tokens of a model that is built from now on; see `ModelConfig.with_windows`."""
        self.config = self.config.with_windows(windows, sink_tokens)

    def cut(self, shard: Shard) -> None:
        """The part of the model that is built from now on. Raises ConfigError for a model that cannot be cut so."""
        check_ranks(self.config, shard.size, shard.stages)
        self.shard = shard

    def compute_dtype(self, dtype: str) -> torch.dtype:
        """The dtype to compute in; `auto` is the checkpoint's own. Raises ConfigError for one that is not supported."""
        name = self.config.dtype if dtype == "auto" else dtype
        if name is None:
            embedding = self.tensors.get(self.config.names.embedding + ".weight")
            name = "float32" if embedding is None else str(embedding.dtype)
        return dtype_named(name)

    def build(
        self,
        max_seq_len: int | None,
        dtype: torch.dtype,
        device: torch.device,
        linears: LinearOptions,
        follow: Follow = Follow(),  # noqa: B008 (immutable)
    ) -> Decoder:
        """Make the model. Raises ConfigError."""
        limit = self._num_positions(max_seq_len)
        config, tensors = self.config, self.tensors
        if isinstance(tensors, GgufTensors):
            config, tensors = tensors.held_for(config, dtype, device, linears)
        elif isinstance(config.quantization, Mxfp4Layers):
            config = replace(config, quantization=Mxfp4Layers.held_on(device, linears.holds_super_blocks))
        with torch.inference_mode():
            return build_decoder(config, tensors, limit, dtype, device, linears, follow, self.shard)

    def assemble(self, parts: Parts, max_seq_len: int | None, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Make the model of parts that an earlier `build` has made. Raises ConfigError."""
        with torch.inference_mode():
            return assemble(of_rank(self.config, self.shard), parts, self._num_positions(max_seq_len), dtype, device)

    def _num_positions(self, max_seq_len: int | None) -> int:
        """The number of positions that the model is built for. Raises ConfigError."""
        return checked_length(max_seq_len, self.config)


def open_directory(directory: Path) -> CheckpointReader:
    """A checkpoint directory, or a GGUF file. Raises ConfigError."""
    if (file := gguf_file(directory)) is not None:
        header = read_header(file)
        config = gguf.read_config(header)
        return CheckpointReader(config, GgufTensors(header, config), parts_of(file))
    config, files = read_model_config(directory), weight_files(directory)
    tensors = _LazyTensors(files)
    bare = _BareTensors(tensors) if _BareTensors.fits(config, tensors) else tensors
    return CheckpointReader(config, bare, [directory / "config.json", *files])


def of_buffers(tensors: Mapping[str, Tensor], json_config: str) -> CheckpointReader:
    """Tensors in memory and the text of a config.json. Raises ConfigError."""
    config = parse_model_config(json_config)
    check_eos_ids(config.eos_ids, config, "config.json")
    return CheckpointReader(config, tensors)


def dtype_named(name: str) -> torch.dtype:
    """Raises ConfigError for a dtype that models are not computed in."""
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: dtype (torch_dtype) {shown(name)} is not supported; use one of {', '.join(DTYPES)} "
            f"with --set model.dtype=..."
        )
    return DTYPES[name]


def checked_length(max_seq_len: int | None, config: ModelConfig) -> int:
    """Tokens of one sequence: as configured, else the model's own limit. Raises ConfigError for more than are supported."""
    limit = max_seq_len or config.max_position
    if limit > config.max_position:
        raise ConfigError(f"model.max_seq_len is {limit}, the model's own limit is {config.max_position}; lower it")
    if limit > MAX_POSITIONS:
        raise ConfigError(
            f"config.json: max_position_embeddings is {config.max_position}, and {limit} positions are more than "
            f"the {MAX_POSITIONS} that are supported; use --set model.max_seq_len={MAX_POSITIONS} or less"
        )
    return limit


def load_directory(
    directory: Path,
    max_seq_len: int | None,
    dtype: str,
    device: torch.device,
    linears: LinearOptions = LinearOptions(),  # noqa: B008 (immutable)
) -> Decoder:
    """Open and build in one go. Raises ConfigError."""
    checkpoint = open_directory(directory)
    return checkpoint.build(max_seq_len, checkpoint.compute_dtype(dtype), device, linears)


def read_eos_ids(directory: Path) -> tuple[int, ...]:
    """Token ids that end a text: generation_config.json's, else config.json's; or a GGUF file's. Raises ConfigError."""
    if (file := gguf_file(directory)) is not None:
        header = read_header(file)
        return check_eos_ids(eos_ids(header), gguf.read_config(header), header.name)
    return eos_ids_of(directory, read_model_config(directory))


def eos_ids_of(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """Like `read_eos_ids`, of a directory whose config.json has been read."""
    ids = token_ids(read_object(directory, GENERATION) or {}, "eos_token_id", GENERATION)
    return check_eos_ids(ids, config, GENERATION) if ids else check_eos_ids(config.eos_ids, config, "config.json")


def open_tensors(paths: list[Path]) -> Mapping[str, Tensor]:
    """The tensors of safetensors files, each read when it is asked for. Raises ConfigError."""
    return _LazyTensors(paths)


# safetensors' types that torch has.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors of safetensors files, each mapped into memory when it is asked for, for as long as it lives: touched pages count as
    used, and are released together with the tensor.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._places: dict[str, StoredTensor] = {}
        for path in paths:
            for name, place in tensor_places(path).items():
                if name in self._places:
                    raise ConfigError(
                        f"tensor {shown(name)} is in {self._places[name].path.name} and in {path.name}; remove the file that is "
                        f"no part of the checkpoint"
                    )
                self._places[name] = place

    def __getitem__(self, name: str) -> Tensor:
        path, kind, shape, start, num_bytes = self._places[name]
        if (dtype := _DTYPES.get(kind)) is None:
            raise ConfigError(
                f"{path.name}: tensor {shown(name)} is {kind}, which cannot be read; convert it to a float type"
            )
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), start + num_bytes - first, access=mmap.ACCESS_COPY, offset=first)
        except ValueError:
            raise ConfigError(f"{path.name} has become shorter since its header was read; fetch it again") from None
        except OSError as error:
            raise ConfigError(
                f"{path.name} cannot be read ({error.strerror}); let this user read it, or fetch it again"
            ) from None
        return torch.frombuffer(pages, dtype=dtype, count=num_bytes // dtype.itemsize, offset=start - first).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _BareTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint of the layers alone, none of whose names has the prefix `model.`, under the usual names."""

    PREFIX = "model."

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @classmethod
    def fits(cls, config: ModelConfig, tensors: Mapping[str, Tensor]) -> bool:
        usual = config.names.layers
        layers = usual.removeprefix(cls.PREFIX)
        is_bare = not any(name.startswith((cls.PREFIX, config.names.head + ".")) for name in tensors)
        return usual != layers and is_bare and any(name.startswith(layers) for name in tensors)

    def __getitem__(self, name: str) -> Tensor:
        if not name.startswith(self.PREFIX):
            raise KeyError(name)
        return self._tensors[name.removeprefix(self.PREFIX)]

    def __iter__(self) -> Iterator[str]:
        return (self.PREFIX + name for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _from_hub(name: str) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return fetch(name)
    except ConfigError as error:
        raise ConfigError(f"model {error}") from None
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {shown(name)}: there is no such directory, and the hub could not be asked for a model of this name "
            f"({type(error).__name__}); give the path of a checkpoint, or connect to a network"
        ) from None
