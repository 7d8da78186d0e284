"""GPTQ checkpoints (Frantar et al., 2022) as AutoGPTQ and GPTQModel write them.

    NAME.qweight   int32 [k / 8, n]          eight rows of k a word
    NAME.qzeros    int32 [k / group, n / 8]  eight columns of n a word; checkpoint_format gptq: zero - 1, gptq_v2: zero
    NAME.scales    float16 [k / group, n]
    NAME.g_idx     int32 [k], may be missing: the group of each row of k; only groups in order are accepted

weight = (q - zero) * scale, 4 bits. AutoGPTQ also stores a bias of zeros for layers that have none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from backend.api.checkpoint.quantised import GptqFormat
from backend.api.errors import ConfigError
from backend.models.quantized import (
    QuantizedLayers,
    Scheme,
    kernel_group,
    nibbles,
)
from backend.models.tensors import TensorSource
from kernels.w4a16 import Weight4, pack


@dataclass(frozen=True)
class GptqLayers(GptqFormat, QuantizedLayers):
    scheme: Scheme = field(default="w4a16", init=False)
    marker: ClassVar[str] = ".qweight"

    def take(self, source: TensorSource, name: str, n: int, k: int) -> Weight4:
        group, repeats = kernel_group(name, self.group, k)
        groups = k // group // repeats
        qweight = source.take_raw(name + ".qweight", (k // 8, n), (torch.int32,))
        qzeros = source.take_raw(name + ".qzeros", (groups, n // 8), (torch.int32,))
        scales = source.take_scales(name + ".scales", (groups, n))
        if source.has(name + ".g_idx"):
            g_idx = source.take_raw(name + ".g_idx", (k,), (torch.int32, torch.int64))
            if not torch.equal(g_idx.cpu().long(), torch.arange(k) // (group * repeats)):
                raise ConfigError(
                    f"tensor {name}.g_idx does not go through the groups in order (desc_act), which is not supported; "
                    f"quantise with desc_act false"
                )
        q = nibbles(qweight).transpose(1, 2).flatten(0, 1)  # [k / 8, n, 8] -> [k, n]
        zeros = nibbles(qzeros).flatten(1)
        if self.version == 1:
            zeros = (zeros + 1) & 15
        zeros, scales = (x.repeat_interleave(repeats, 0) for x in (zeros, scales))
        return Weight4(pack(q.T.contiguous(), group), scales, zeros.to(scales.dtype), group)
