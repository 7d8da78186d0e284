"""TensorSource: checkpoint tensors by name, each taken exactly once, with its shape checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backend.api.errors import ConfigError


class TensorSource:
    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device):
        self._tensors = tensors
        self._left = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}  # derived from the config
        self._dtype, self._device = dtype, device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the model's dtype on its device. Raises ConfigError when missing or of another shape."""
        if name not in self._left:
            raise ConfigError(f"the checkpoint lacks the tensor {name}; its config.json describes another model")
        self._left.remove(name)
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
        return tensor.to(self._device, self._dtype)

    def take_copy(self, name: str, original: Tensor) -> None:
        """Use up a tensor that may be there and must then equal `original`. Raises ConfigError when it differs."""
        if name in self._left and not torch.equal(self.take(name, tuple(original.shape)), original):
            raise ConfigError(
                f"tensor {name} differs from the one it is tied to; set tie_word_embeddings to false in config.json"
            )

    def check_all_used(self) -> None:
        """Raise ConfigError when tensors are left over: the model would not be the one that was trained."""
        if self._left:
            raise ConfigError(f"{len(self._left)} tensors of the checkpoint are not used, {min(self._left)} among them")
