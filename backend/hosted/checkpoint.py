"""A checkpoint of a family that has no native description: opened and checked by its config.json, built by transformers."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import logging as library_logging

from backend.api.checkpoint.model_files import shown, token_ids
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.description import LayerConfig, ModelConfig, RopeConfig
from backend.architectures.hosted import ENCODERS, PART_PREFIX, PARTS
from backend.architectures.settings import HARMLESS, is_harmless
from backend.hosted import attention, experts
from backend.hosted.attention import AttentionHost
from backend.hosted.encoder import Encoder
from backend.hosted.experts import hold_experts
from backend.hosted.layers import replace_linears
from backend.hosted.model import HostedModel, sentence_of
from backend.hosted.products import Products
from backend.hosted.sizes import check_elements
from backend.models.linears import LinearOptions
from backend.models.loader import checked_length, dtype_named

log = logging.getLogger("everbatch.worker")

MAX_TOLD = 8  # unknown keys in a remark
MAX_MODULES = 4096  # layers, or experts of a layer: bounds what a number in config.json can make the library build
# Tensors of encoders that embeddings do not need: heads for classes and for masked words, and constants that older versions of
# transformers saved.
_UNUSED = re.compile(
    r"(.*\.)?(pooler\..*|position_ids|token_type_ids)|(cls|lm_head|vocab_\w+|head|decoder|predictions|generator_\w+)\..*"
)
# Keys that say how many modules are built, of config.json and of its text_config.
_COUNTS = re.compile(r"(moe_)?(num|n)_(\w+_)?(layers?|experts?)")


class HostedCheckpoint:
    """Has the interface of backend.models.loader.CheckpointReader. Nothing large is read before `build`."""

    def __init__(self, content: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """`content`: of config.json. Raises ConfigError."""
        _check_quantization(content)
        self._library_config = library_config(content)
        self.config = engine_config(content, self._library_config)
        self.remarks = _remarks(content, self._library_config, self.config.architecture)
        self.is_encoder = self.config.architecture in ENCODERS
        self.has_head = not self.is_encoder
        self.tensors = _TextPart(tensors) if self.config.architecture in PARTS else tensors

    def limit_attention(self, windows: object, sink_tokens: int) -> None:
        """Raises ConfigError if windows or sink tokens are configured: a hosted model's windows are its own."""
        if windows is not None or sink_tokens:
            raise ConfigError(
                f"kv_cache.max_attention_window and kv_cache.sink_tokens cannot be set for {self.config.architecture}, which "
                f"transformers runs; leave them out"
            )

    def compute_dtype(self, dtype: str) -> torch.dtype:
        """The dtype to compute in; `auto` is the checkpoint's own. Raises ConfigError for one that is not supported."""
        return dtype_named((self.config.dtype or "float32") if dtype == "auto" else dtype)

    def build(
        self, max_seq_len: int | None, dtype: torch.dtype, device: torch.device, linears: LinearOptions
    ) -> HostedModel:
        """Make the model. Raises ConfigError."""
        limit = checked_length(max_seq_len, self.config)
        _check_positions(self._library_config, limit)
        with torch.inference_mode(), quiet():
            module = self._load(dtype).to(device)
            head = module.get_output_embeddings()
            replace_linears(module, head, linears)
            hold_experts(module, linears)
            host, products = AttentionHost(module, self.is_encoder), Products(linears)
            model = (Encoder if self.is_encoder else HostedModel)(
                self.config, module.eval(), host, products, limit, dtype
            )
            model.learn()
        return model

    def _load(self, dtype: torch.dtype) -> Any:
        lazy = {name: _Lazy(self.tensors, name) for name in self.tensors}
        config = self._library_config
        config._attn_implementation = attention.NAME
        try:
            mapping = transformers.MODEL_MAPPING if self.is_encoder else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            family = mapping[type(config)]
            has_pooler = self.is_encoder and "add_pooling_layer" in inspect.signature(family).parameters
            options = {"add_pooling_layer": False} if has_pooler else {}
            check_elements(partial(family, deepcopy(config), **options), self.tensors)
            module, found = family.from_pretrained(
                None,
                config=config,
                state_dict=lazy,
                dtype=dtype,
                attn_implementation=attention.NAME,
                experts_implementation=experts.NAME,
                output_loading_info=True,
                **options,
            )
        except ConfigError:
            raise
        except Exception as error:  # the library checks shapes and settings by exceptions of all kinds
            raise ConfigError(f"{self.config.architecture} cannot be loaded: {sentence_of(error)}") from None
        if self.is_encoder:
            found["unexpected_keys"] = [name for name in found["unexpected_keys"] if not _UNUSED.fullmatch(name)]
        _check(found)
        return module


def library_config(content: dict[str, Any]) -> PretrainedConfig:
    """The library's configuration of a config.json. Raises ConfigError for one that it does not accept."""
    part = content.get("text_config")
    for name, count in [*content.items(), *(part.items() if isinstance(part, dict) else ())]:
        if _COUNTS.fullmatch(name) and isinstance(count, int) and not 0 <= count <= MAX_MODULES:
            raise ConfigError(f"{FILE}: {name} is {shown(count)}, allowed is 0 to {MAX_MODULES}; correct it")
    kind = content.get("model_type")
    known = transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"{FILE}: model_type {shown(kind)} is not known to transformers {transformers.__version__}; use another model"
        )
    try:
        with quiet():
            config = known[kind].from_dict(dict(content))
            return config.get_text_config(decoder=True)
    except Exception as error:  # configuration classes raise what they please
        raise ConfigError(f"{FILE}: transformers does not accept it: {sentence_of(error)}; correct it") from None


def _remarks(content: Mapping[str, Any], config: PretrainedConfig, architecture: str) -> tuple[str, ...]:
    """Sentences for the operator: that transformers runs the model, and which keys of config.json it does not know."""
    remarks = [
        f"{architecture} is run by the transformers library with this engine's layers, which is slower for one request at a time "
        f"(docs/models.md)"
    ]
    known = {*type(config)().to_dict(), *config.attribute_map, *HARMLESS}
    text = content.get("text_config")
    unknown = [
        key
        for key, value in (text if isinstance(text, dict) else content).items()
        if key not in known and not is_harmless(key, value)
    ]
    if unknown:
        keys = ", ".join(shown(key) for key in unknown[:MAX_TOLD])
        remarks.append(
            f"config.json has keys that transformers {transformers.__version__} does not know of {type(config).__name__}, which "
            f"have no effect: {keys}{', ...' if len(unknown) > MAX_TOLD else ''}; check that the model does not need them"
        )
    return tuple(remarks)


def engine_config(content: dict[str, Any], config: Any) -> ModelConfig:
    """The part that config.json tells; heads and windows are known once the model is built. Raises ConfigError."""
    try:
        layers = int(config.num_hidden_layers)
        hidden, vocab, positions = int(config.hidden_size), int(config.vocab_size), int(config.max_position_embeddings)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{FILE}: transformers' configuration lacks a size ({sentence_of(error)}); use another model"
        ) from None
    names = content.get("architectures") or ["none"]
    if (encoder := ENCODERS.get(str(names[0]))) is not None:
        positions -= encoder.first_position(config.pad_token_id)
    dtype = content.get("dtype") or content.get("torch_dtype")
    return ModelConfig(
        architecture=str(names[0]),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=_head_dim(config, hidden),
        max_position=positions,
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        layers=(LayerConfig(),) * layers,
        ropes=(RopeConfig(),),
        dtype=dtype if isinstance(dtype, str) else None,
        eos_ids=token_ids(content, "eos_token_id", FILE),
        quantization=None,
        kv_cache_dtype=None,
    )


def _head_dim(config: Any, hidden: int) -> int:
    """An estimate before the model is built, by which the tier is chosen."""
    try:
        heads, given = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    except Exception:  # a setting that differs between layers, which the library refuses to read
        return hidden
    return given if isinstance(given, int) else hidden // heads if isinstance(heads, int) and heads > 0 else hidden


class _TextPart(Mapping[str, Tensor]):
    """The tensors of the text model in a checkpoint of several models, by the names that they have in one of their own."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        whole = {name: name for name in tensors if name.startswith("lm_head.")}
        part = {"model." + name.removeprefix(PART_PREFIX): name for name in tensors if name.startswith(PART_PREFIX)}
        self._names = {**whole, **part}
        log.info("%d tensors beside the text model are left out", len(tensors) - len(self._names))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Lazy:
    """A tensor that is read when the library indexes it, as a slice of a safetensors file is."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self._tensors, self._name = tensors, name

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensors[self._name][index]

    def get_shape(self) -> list[int]:
        return list(self._tensors[self._name].shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensors[self._name], name)


def _check_quantization(content: dict[str, Any]) -> None:
    """Raise ConfigError for a quantised checkpoint. MXFP4, of gpt-oss, becomes floats while it is read."""
    section = content.get("quantization_config") or content.get("compression_config")
    method = section.get("quant_method") if isinstance(section, dict) else section
    if method not in (None, "mxfp4"):
        raise ConfigError(
            f"{FILE}: quantization_config: quant_method {shown(method)} is not supported where transformers runs the model; use "
            f"the checkpoint in floats, and --set model.quantization=w8a8 or w4a8"
        )


def _check_positions(config: Any, limit: int) -> None:
    """Raise ConfigError where the library would rotate a token by the length of the longest text beside it."""
    given = getattr(config, "rope_parameters", None) or {}
    sections = [given, *(section for section in given.values() if isinstance(section, dict))]
    for section in sections:
        original = section.get("original_max_position_embeddings")
        if section.get("rope_type") == "longrope" and isinstance(original, int) and limit > original:
            raise ConfigError(
                f"model.max_seq_len is {limit}, and where transformers runs a model with longrope, positions beyond {original} "
                f"would change those of the texts beside; use --set model.max_seq_len={original}"
            )


def _check(found: dict[str, Any]) -> None:
    """Raise ConfigError when the checkpoint lacks tensors of the model, or has others."""
    for kind, text in (
        ("missing_keys", "the checkpoint lacks the tensor {}; its config.json describes another model"),
        ("mismatched_keys", "tensor {} has another shape than config.json asks for; they are of different models"),
        ("unexpected_keys", "tensor {} of the checkpoint is not used; its config.json describes another model"),
        ("error_msgs", "the checkpoint cannot be read: {}"),
    ):
        if names := found.get(kind):
            first = min(str(name[0] if isinstance(name, tuple) else name) for name in names)
            raise ConfigError(text.format(shown(first)))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's own reports and progress bars: what is wrong is said by ConfigError."""
    level = library_logging.get_verbosity()
    bars = library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        if bars:
            library_logging.enable_progress_bar()
