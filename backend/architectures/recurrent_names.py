"""How checkpoints name and divide the tensors of recurrent layers."""

from __future__ import annotations

from msgspec import Struct


class Split(Struct, frozen=True):
    """A projection that is stored with others in one tensor. Its rows are `groups` groups, of each part in order so many rows."""

    stored: str
    groups: int
    parts: tuple[tuple[str, int], ...]  # the name by which the decoder takes the part, its rows in a group


class RecurrentNames(Struct, frozen=True):
    """Names of a recurrent layer's tensors, as in LayerNames."""

    inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    gates: tuple[str, ...] = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
    out: str = "linear_attn.out_proj"
    convolution: str = "linear_attn.conv1d"
    log_rate: str = "linear_attn.A_log"  # this and the next two: whole names, [value_heads]
    dt_bias: str = "linear_attn.dt_bias"
    skip: str = "linear_attn.D"  # mamba2
    norm: str = "linear_attn.norm"
