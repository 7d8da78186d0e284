"""TensorSource: checkpoint tensors by name, each taken exactly once, with its shape checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource:
    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, unused: Iterable[str] = ()
    ) -> None:
        """`unused`: regular expressions of the names that are ignored."""
        self._tensors = tensors
        # Rotary frequencies are computed from the configuration, so stored ones are ignored.
        ignored = re.compile("|".join((r".*rotary_emb\.inv_freq", *unused)), re.DOTALL)
        self._left = {name for name in tensors if not ignored.fullmatch(name)}
        self.dtype, self.device = dtype, device

    def has(self, name: str) -> bool:
        """True if the checkpoint holds a tensor that has not been taken yet."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the model's dtype on its device, in memory of its own. Raises ConfigError like `take_raw`."""
        return self.take_stacked({name: shape[0]}, shape[1:])

    def take_stacked(self, rows: Mapping[str, int], columns: tuple[int, ...]) -> Tensor:
        """Like `take` for several tensors of [their rows, *columns], stacked in order."""
        return torch.cat([self.take_raw(name, (count, *columns)).to(self.dtype) for name, count in rows.items()])

    def take_raw(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Return a tensor on the model's device as it is stored; hold it briefly, it may be a view of the whole file.

        Raises ConfigError when it is missing, has been taken, or has another shape or none of `dtypes`.
        """
        if name not in self._left:
            raise ConfigError(f"the checkpoint lacks the tensor {shown(name)}; its config.json describes another model")
        self._left.remove(name)
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; they are of different "
                f"models"
            )
        if tensor.dtype not in dtypes:
            raise ConfigError(
                f"tensor {name} is {tensor.dtype}, {' or '.join(map(str, dtypes))} is expected; convert the checkpoint"
            )
        return tensor.to(self.device)

    def put_back(self, name: str) -> None:
        """Say that a tensor which was taken is to be taken once more."""
        self._left.add(name)

    def take_scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Like `take_raw`, for scales. Also raises ConfigError when one of them is not finite."""
        scales = self.take_raw(name, shape)
        wrong = scales[~scales.isfinite()]
        if wrong.numel():
            raise ConfigError(f"tensor {name} holds {wrong[0].item()}, scales must be finite; quantise the model again")
        return scales

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError when a tensor has another shape; call it before allocating memory for what it becomes."""
        if name in self._left and tuple(self._tensors[name].shape) != shape:
            self.take_raw(name, shape)

    def take_copy(self, name: str, original: Tensor) -> None:
        """Use up a tensor that may be there and must then equal `original`. Raises ConfigError when it differs."""
        if name in self._left and not torch.equal(self.take(name, tuple(original.shape)), original):
            raise ConfigError(
                f"tensor {name} differs from the one it is tied to; set tie_word_embeddings to false in config.json"
            )

    def drop_zeros(self, names: Iterable[str]) -> None:
        """Use up tensors that may be there and must then be zero. Raises ConfigError when one is not."""
        for name in self._left.intersection(names):
            self._left.remove(name)
            if self._tensors[name].any():
                raise ConfigError(f"tensor {name} is not zero, but by its config.json the model has none there")

    def leave_out(self, prefixes: tuple[str, ...]) -> None:
        """Ignore the tensors whose names begin so, because another rank has them."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def check_all_used(self) -> None:
        """Raise ConfigError when tensors are left over: the model would not be the one that was trained."""
        if self._left:
            raise ConfigError(
                f"{len(self._left)} tensors of the checkpoint are not used, {shown(min(self._left))} among them; "
                f"its config.json describes another model"
            )
