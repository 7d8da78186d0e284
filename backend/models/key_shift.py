"""The part of a bias that all keys of a head have, for a KV cache that is quantised (kernels/common/kv_rotation.py)."""

from __future__ import annotations

import torch

from backend.layers.attention import AttentionWeights
from backend.layers.rotary import inverse_frequencies
from backend.models.decoder import Decoder
from kernels.common.kv_rotation import mean_of_rotated


@torch.inference_mode()
def shift_keys(model: Decoder) -> None:
    """Give layers whose keys have a bias their key_shift, where all scores of a query may change by the same number.

    The bias is what the projection yields of zeros, which is its own in every format of weights.
    """
    config = model.config
    block, first, keys = config.block, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if not block.qkv_bias or block.qk_norm != "none" or block.attention_softcap or block.attention_sinks:
        return
    nothing = torch.zeros(1, config.hidden_size, dtype=model.dtype, device=model.device)
    for layer, settings in zip(model.layers, config.held_settings, strict=True):
        if not isinstance(layer.attention, AttentionWeights):
            continue
        bias = layer.attention.qkv(nothing)[0, first : first + keys].float().view(-1, config.head_dim)
        layer.attention.key_shift = bias
        if settings.rope is not None:
            rope = config.ropes[settings.rope]
            frequencies = inverse_frequencies(rope, config.head_dim, model.max_seq_len)
            of_rope = frequencies, rope.attention_factor, block.rope_interleaved
            layer.attention.key_shift = mean_of_rotated(bias, *of_rope)
