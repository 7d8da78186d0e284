"""W_q and W_k between the rotary layouts of Meta and of Hugging Face. GGUF files of the Llama family have Meta's.

Meta's Llama rotates neighbouring rows (0,1), (2,3), ...; Hugging Face's pairs row i with row i + head_dim/2. The weights differ
by a permutation of the rows of each head and are otherwise the same.

    Meta   a0 b0 a1 b1 a2 b2       Hugging Face   a0 a1 a2 b0 b1 b2
"""

from __future__ import annotations

from torch import Tensor


def meta_to_hf(weight: Tensor, num_heads: int) -> Tensor:
    """Permute rows [num_heads * head_dim, ...] from pairs to halves; a quantised weight's row scales are permuted alike."""
    pairs: Tensor = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def hf_to_meta(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `meta_to_hf`."""
    halves: Tensor = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
