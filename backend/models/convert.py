"""Checkpoints whose rows stand in another order than the decoder's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig


def meta_to_hf(weight: Tensor, num_heads: int) -> Tensor:
    """Permute rows [num_heads * head_dim, ...] from pairs to halves; a quantised weight's row scales are permuted alike.

    Meta's Llama, and GGUF files of its family, rotate neighbouring rows (0,1), (2,3), ...; Hugging Face's pairs row i with row
    i + head_dim/2. The weights W_q and W_k differ by a permutation of the rows of each head and are otherwise the same.

        Meta   a0 b0 a1 b1 a2 b2       Hugging Face   a0 a1 a2 b0 b1 b2
    """
    pairs: Tensor = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def hf_to_meta(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `meta_to_hf`."""
    halves: Tensor = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


class QkvByHead(Mapping[str, Tensor]):
    """The tensors of a checkpoint whose fused projection holds query, key and value of a head after another (GPT-NeoX).

    stored   q0 k0 v0 q1 k1 v1       here   q0 q1 k0 k1 v0 v1
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
        """Raises ConfigError for a quantised checkpoint."""
        if config.quantization is not None:
            raise ConfigError(
                f"config.json: a quantised checkpoint of {config.architecture} is not supported; use a float checkpoint with "
                f"--set model.quantization=..."
            )
        self._tensors, self._num_heads = tensors, config.num_heads
        self._names = tuple(f".{config.names.layer.qkv[0]}.{kind}" for kind in ("weight", "bias"))

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if not name.endswith(self._names) or len(tensor) % (
            3 * self._num_heads
        ):  # the reader of the tensor reports its wrong shape
            return tensor
        by_head: Tensor = tensor.unflatten(0, (self._num_heads, 3, -1))
        return by_head.transpose(0, 1).flatten(0, 2)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
