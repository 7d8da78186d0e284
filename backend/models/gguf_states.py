"""The tensors of recurrent layers as a Hugging Face checkpoint has them, made of those of a GGUF file (gguf/recurrent.py)."""

from __future__ import annotations

from torch import Tensor

from backend.architectures.description import ModelConfig, Recurrence


def as_family(name: str, tensor: Tensor, config: ModelConfig, is_tiled: bool) -> Tensor:
    """name: in the file, behind the layer's number. is_tiled: its value heads are not in the family's order; the columns of
    `ssm_out` are then those of blocks, where it is quantised, each of which is within a head.
    """
    settings = config.recurrence
    if settings is None:
        return tensor
    base = name.removesuffix(".weight")
    if is_tiled and settings.key_heads != settings.value_heads:
        tensor = _of_key_heads(base, tensor, settings)
    if base == "ssm_a":
        return tensor.float().neg().log().flatten()
    if base in ("ssm_conv1d", "shortconv.conv"):
        return tensor.unsqueeze(1)
    return tensor.flatten() if base in ("ssm_d", "ssm_norm") else tensor


def _of_key_heads(base: str, tensor: Tensor, settings: Recurrence) -> Tensor:
    """The value heads of a key head beside each other, in rows, in rows behind those of queries and keys, or in columns."""
    keys = settings.key_heads
    heads = (settings.value_heads // keys, keys, -1)
    if base in ("ssm_a", "ssm_dt.bias", "ssm_alpha", "ssm_beta", "attn_gate"):
        rows: Tensor = tensor.unflatten(0, heads).transpose(0, 1).flatten(0, 2)
        return rows
    if base in ("attn_qkv", "ssm_conv1d"):
        first = 2 * settings.num_keys
        ordered = tensor.clone()
        ordered[first:] = tensor[first:].unflatten(0, heads).transpose(0, 1).flatten(0, 2)
        return ordered
    if base == "ssm_out":
        columns: Tensor = tensor.unflatten(1, heads).transpose(1, 2).flatten(1, 3)
        return columns
    return tensor
