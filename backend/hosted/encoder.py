"""Encoder: a model that transformers runs and that makes hidden states of whole texts, such as BERT. It has no head."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import torch
from torch import Tensor

from backend.architectures.description import LayerConfig, ModelConfig
from backend.architectures.hosted import ENCODERS
from backend.hosted.attention import AttentionHost
from backend.hosted.model import HostedModel
from backend.hosted.products import Products


class Encoder(HostedModel):
    is_encoder = True

    def __init__(
        self,
        config: ModelConfig,
        module: Any,
        host: AttentionHost,
        products: Products,
        max_seq_len: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, module, host, products, max_seq_len, dtype)
        del self.outputs["logits"]
        self._first_position = ENCODERS[config.architecture].first_position(module.config.pad_token_id)
        self._has_types = "token_type_ids" in inspect.signature(module.forward).parameters

    def _run(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Run the module, which leaves its hidden states in `_hidden`.

        There are no logits. The sampler gets zeros [rows, vocab], and no client does: without a head requests for tokens or
        logits are refused.
        """
        types = {"token_type_ids": torch.zeros_like(token_ids)[None]} if self._has_types else {}
        self._module(input_ids=token_ids[None], position_ids=(positions + self._first_position)[None], **types)
        return torch.zeros((), device=token_ids.device).expand(len(rows), self.config.vocab_size)

    def _described(self) -> ModelConfig:
        """Without windows, which are the business of the KV cache: an encoder keeps none."""
        config = super()._described()
        return msgspec.structs.replace(config, layers=(LayerConfig(),) * config.num_layers)
