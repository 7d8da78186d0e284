"""The vision tower of a model that reads images, and what turns its results into features: transformers' own code over the
engine's linear layers. The decoder is not built here; the features enter it in the place of embeddings.

An image is encoded alone, so that its features do not depend on others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from backend.api.checkpoint.model_files import shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError, InvalidRequest
from backend.api.images import ImageInput
from backend.architectures.description import ModelConfig
from backend.hosted.checkpoint import quiet
from backend.hosted.features import Features
from backend.hosted.layers import replace_linears
from backend.hosted.model import sentence_of
from backend.hosted.sizes import check_elements
from backend.models.linears import LinearOptions

_SMALLEST = 8  # tokens of the decoder that stands in for the real one and is thrown away
_DTYPES = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}


class ImageTower:
    """Not thread-safe: one thread encodes."""

    def __init__(self, config: ModelConfig, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        assert config.images is not None
        self._images, self._hidden = config.images, config.hidden_size
        self._module, self._dtype, self._device = module, dtype, device
        self.bytes_per_token = (1 + config.images.added_layers) * config.hidden_size * dtype.itemsize
        self._takes = inspect.signature(module.get_image_features).parameters

    @torch.inference_mode()
    def features(self, image: ImageInput) -> Features:
        """Raises InvalidRequest for an image that the tower cannot read."""
        inputs = {name: _tensor(image, name).to(self._device) for name in image.inputs if name in self._takes}
        inputs["pixel_values"] = normalised(inputs["pixel_values"], image).to(self._dtype)
        try:
            found = self._module.get_image_features(**inputs, return_dict=True)
        except Exception as error:  # module code of any family
            raise InvalidRequest(f"the model's vision tower cannot read the image: {sentence_of(error)}") from None
        vectors = _whole(found.pooler_output)
        added = tuple(map(_whole, getattr(found, "deepstack_features", None) or ()))
        if vectors.shape != (image.num_tokens, self._hidden) or len(added) != self._images.added_layers:
            raise InvalidRequest(
                f"the image has {image.num_tokens} tokens, and the model's vision tower yields features of the shape "
                f"{list(vectors.shape)}; the checkpoint's processor is of another model"
            )
        grid = image.inputs.get("image_grid_thw")
        rows, columns = (
            (0, 0) if grid is None else (int(each) // self._images.merge for each in inputs["image_grid_thw"][0, 1:])
        )
        return Features(vectors.to(self._dtype), (rows, columns), tuple(each.to(self._dtype) for each in added))


def build_tower(
    content: dict[str, Any],
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    linears: LinearOptions,
) -> ImageTower:
    """content: of config.json. Raises ConfigError for a tower that the library does not know or cannot build."""
    own = {name: tensors[name] for name in tensors if not _is_of_decoder(name, config)}
    with torch.inference_mode(), quiet():
        library, family = _library(content)
        try:
            check_elements(partial(family, deepcopy(library)), tensors)
            module, found = family.from_pretrained(
                None, config=library, state_dict=own, dtype=dtype, output_loading_info=True
            )
        except ConfigError:
            raise
        except Exception as error:  # the library checks shapes and settings by exceptions of all kinds
            raise ConfigError(
                f"the vision tower of {config.architecture} cannot be loaded: {sentence_of(error)}"
            ) from None
        _check(found)
        whole = module.model
        for name in ("language_model", "text_model"):
            if hasattr(whole, name):
                delattr(whole, name)
        replace_linears(whole, None, linears)
        return ImageTower(config, whole.eval().to(device), dtype, device)


def normalised(pixels: Tensor, image: ImageInput) -> Tensor:
    """Pixels [..., channels, height, width], or patches [n, channels * rest], scaled and normalised in float32."""
    if image.scale is None:
        return pixels
    factor, means, deviations = image.scale
    shape = pixels.shape
    by_channel = pixels.float().view(len(pixels), len(means), -1, 1) if pixels.dim() == 2 else pixels.float()
    mean, deviation = (torch.tensor(each, device=pixels.device)[:, None, None] for each in (means, deviations))
    return ((by_channel * factor - mean) / deviation).view(shape)


def _library(content: dict[str, Any]) -> tuple[Any, Any]:
    """The library's configuration with a decoder of no layers, and its class. Raises ConfigError."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{FILE}: model_type {shown(kind)} is not known to transformers {transformers.__version__}; use another model"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(deepcopy(content))
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size = 0, _SMALLEST
        for each in (config, text):
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                setattr(each, name, None)
            each.tie_word_embeddings = False
        with suppress(AttributeError):
            text.layer_types = []
        return config, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    except Exception as error:  # configuration classes raise what they please
        raise ConfigError(f"{FILE}: transformers does not accept it: {sentence_of(error)}; correct it") from None


def _is_of_decoder(name: str, config: ModelConfig) -> bool:
    names = config.names
    return name.startswith((names.layers, names.embedding + ".", names.norm + ".", names.head + ".", "mtp."))


def _check(found: dict[str, Any]) -> None:
    """Raise ConfigError where the checkpoint lacks tensors of the tower, or has others."""
    parts = ("language_model.", "text_model.", "lm_head.")
    missing = [name for name in found["missing_keys"] if not any(part in name for part in parts)]
    for names, text in (
        (missing, "the checkpoint lacks the tensor {}; its config.json describes another vision tower"),
        (
            found["mismatched_keys"],
            "tensor {} has another shape than config.json asks for; they are of different models",
        ),
        (found["unexpected_keys"], "tensor {} of the checkpoint is not used; its config.json describes another model"),
    ):
        if names:
            raise ConfigError(
                text.format(shown(min(str(each[0] if isinstance(each, tuple) else each) for each in names)))
            )


def _whole(found: Any) -> Tensor:
    """Features [tokens, hidden] of an image, which families return whole, in a list, or by tiles."""
    parts = list(found) if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _tensor(image: ImageInput, name: str) -> Tensor:
    given = image.inputs[name]
    return torch.frombuffer(bytearray(given.data), dtype=_DTYPES[given.dtype]).view(given.shape)
