"""How much each input of a model's linear layers counts: its mean square over a short text. Rounding to blocks needs it
(kernels/common/rounding.py), and runs while a model is loaded, so that the text is short, and built in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from backend.api.errors import ConfigError, EverbatchError
from backend.architectures.description import ModelConfig
from backend.quant.calibration import Calibration
from backend.quant.folds import stored_layer
from backend.quant.text import built_in_texts
from backend.text.tokenizer import Tokenizer

log = logging.getLogger("everbatch.quant")
ROWS, ROW_TOKENS = 4, 256  # few, because a model of floats reads them while a server starts
STEPS = 2  # steps of a doubling: so coarse a number is the same one on every kind of CPU


class Importance:
    """Callable: the name of a projection -> float32 [k], or None where it is not known. It is measured at the first call."""

    def __init__(
        self, path: Path, config: ModelConfig, tensors: Mapping[str, Tensor], progress: Callable[[str], None]
    ) -> None:
        """path: of the tokenizer. config, tensors: the whole model's."""
        self._path, self._config, self._tensors, self._progress = path, config, tensors, progress
        self._found: dict[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor | None:
        if self._found is None:
            try:
                self._progress("measuring the inputs of its layers, which decide how its weights are rounded")
                self._found = measured(self._config, self._tensors, token_rows(self._path, self._config.vocab_size))
            except EverbatchError as error:
                log.warning(
                    "all inputs count alike when weights are rounded to few bits, which costs quality: %s", error
                )
                self._found = {}
        return self._found.get(name)


def token_rows(path: Path, vocab_size: int) -> Tensor:
    """int64 [ROWS, ROW_TOKENS]: the built-in text; where the model has no tokenizer, or Python no sources, tokens at random."""
    try:
        tokenizer = Tokenizer.from_directory(path)
        texts = [tokenizer.encode(text[: 8 * ROW_TOKENS]) for text in built_in_texts()]
        rows = [ids[:ROW_TOKENS] for ids in texts if len(ids) >= ROW_TOKENS and max(ids[:ROW_TOKENS]) < vocab_size]
    except ConfigError:
        rows = []
    if len(rows) >= ROWS:
        return torch.tensor(rows[:ROWS])
    return torch.randint(vocab_size, (ROWS, ROW_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def measured(config: ModelConfig, tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Projection -> the importance of its inputs, positive, float32 [k]. Raises ConfigError for damaged weights."""
    rows = rows[:, : config.max_position]
    config = replace(config, quantization=None)
    embedding = tensors[config.names.embedding + ".weight"]
    calibration = Calibration(config, embedding, rows, has_hessians=False)
    found: dict[str, Tensor] = {}
    for index in range(config.num_layers):
        prefix = f"{config.names.layers}{index}."
        layer = {name: tensor.float() for name, tensor in stored_layer(tensors, config, index).items()}
        found |= {prefix + name: coarse(each) for name, each in calibration.mean_squares(index, layer).items()}
    return found


def coarse(mean_square: Tensor) -> Tensor:
    """[k] in steps of a half doubling, relative to the mean; 0 counts as a millionth of it."""
    relative = mean_square / mean_square.mean().clamp(min=1e-30)
    return torch.exp2((relative.clamp(min=1e-6).log2() * STEPS).round() / STEPS)
