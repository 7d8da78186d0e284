"""Checkpoints made to do harm; each must end in one sentence."""

from __future__ import annotations

from tests.model.hostile import configs, gguf_parts, ggufs, texts, weights
from tests.model.hostile.base import Case

CASES: list[Case] = [*configs.CASES, *weights.CASES, *texts.CASES, *ggufs.CASES, *gguf_parts.CASES]
