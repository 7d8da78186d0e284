"""Checkpoints in FP8 (e4m3, arXiv:2209.05433), presented as floats: NAME.weight [n, k] times the scales beside it.

    NAME.weight_scale_inv    float [ceil(n / rows), ceil(k / columns)] of blocks, usually 128 x 128: DeepSeek's and Qwen's -FP8
    NAME.weight_scale        float [n, 1] or [n], one a row; [1] or [], one for all; or of blocks: compressed-tensors, ModelOpt
    NAME.input_scale, ...    static scales of activations, and of keys and values, which are not read: activations have scales
                             of their own token here, and KV the type that the server is set to

A weight becomes floats when it is asked for, one at a time. Tensors without a scale stay as they are. Sources: transformers,
`integrations/finegrained_fp8.py`; the compressed-tensors library, `quantization/lifecycle/forward.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from backend.api.checkpoint.quantised import Fp8Format
from backend.api.errors import ConfigError

_WEIGHT = ".weight"
_SCALES = (".weight_scale_inv", ".weight_scale")
_UNREAD = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
_AGAIN = "fetch the checkpoint again"


class Fp8Tensors(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], format: Fp8Format) -> None:
        self._tensors, self._format = tensors, format
        self._scales = {
            name.removesuffix(end) + _WEIGHT: name for name in tensors for end in _SCALES if name.endswith(end)
        }
        hidden = set(self._scales.values())
        self._names = [name for name in tensors if name not in hidden and not name.endswith(_UNREAD)]

    def __getitem__(self, name: str) -> Tensor:
        tensor, scaled_by = self._tensors[name], self._scales.get(name)
        if tensor.dtype == torch.float8_e5m2 or (scaled_by is None and tensor.dtype == torch.float8_e4m3fn):
            raise ConfigError(f"tensor {name} is {tensor.dtype} and has no scale of e4m3 beside it; {_AGAIN}")
        if scaled_by is None or tensor.dtype != torch.float8_e4m3fn:
            return tensor
        scale = self._tensors[scaled_by].float()
        if tensor.dim() != 2:
            raise ConfigError(
                f"tensor {name} of FP8 has {tensor.dim()} dimensions, two are needed; use another checkpoint"
            )
        if not scale.isfinite().all():
            raise ConfigError(f"tensor {scaled_by} holds a number that is not finite; {_AGAIN}")
        return tensor.float() * self._spread(scale, tensor.shape, scaled_by)

    def _spread(self, scale: Tensor, shape: torch.Size, name: str) -> Tensor:
        """The scales of a weight of this shape, as a tensor that multiplies it. Raises ConfigError."""
        n, k = shape
        if scale.numel() == 1:
            return scale.view(1, 1)
        if tuple(scale.shape) in ((n,), (n, 1)):
            return scale.view(n, 1)
        if self._format.block is not None:
            rows, columns = self._format.block
            if tuple(scale.shape) == (-(-n // rows), -(-k // columns)):
                return scale[torch.arange(n) // rows][:, torch.arange(k) // columns]
        raise ConfigError(
            f"tensor {name} has shape {list(scale.shape)}, which does not fit a weight of {[n, k]} in blocks of "
            f"{self._format.block}; {_AGAIN}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
