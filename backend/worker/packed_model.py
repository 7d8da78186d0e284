"""Builds a model for the native tier: packs its weights, or maps what an earlier start has packed (weight_cache.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from msgspec.structs import replace

from backend.api.config.schema import ModelConfigSection
from backend.layers.linear import Linear
from backend.models.decoder import Decoder, Follow
from backend.models.linears import LinearOptions
from backend.models.loader import CheckpointReader
from backend.models.parts import Parts
from backend.worker.fingerprint import content_hash, state_of
from backend.worker.kept_parts import KeptParts, RecordedParts
from backend.worker.native_tier import make_screen
from backend.worker.weight_cache import WeightCache, key_of
from backend.worker.weight_file import DamagedWeights
from kernels.cpu.build import NativeLibrary
from kernels.cpu.linear import PackedLinear
from kernels.cpu.screen import Screen

log = logging.getLogger("everbatch.worker")
CPU = torch.device("cpu")
MIN_BYTES = 64 << 20  # a smaller checkpoint is packed in less than a second
QUIET_S = 2.0  # between two lines of progress


class PackedModel(NamedTuple):
    decoder: Decoder
    screen: Screen | None = None
    mapped_bytes: int = 0  # weights that are pages of a file, shared with other engines that run the same model


class PackedModels:
    """How a checkpoint is built in one configuration."""

    def __init__(
        self,
        checkpoint: CheckpointReader,
        section: ModelConfigSection,
        dtype: torch.dtype,
        linears: LinearOptions,
        library: NativeLibrary,
        progress: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._section, self._dtype, self._linears = checkpoint, section, dtype, linears
        self._library, self._progress = library, progress
        self._cache = WeightCache.of(section)

    def build(self) -> PackedModel:
        """Raises ConfigError."""
        try:
            state = state_of(self._checkpoint.files)
            if not self._cache.is_on or sum(size for _, _, size, _, _ in state) < MIN_BYTES:
                return PackedModel(self._pack(Follow(layers=self._tell_layers())))
            key = self._key()
        except OSError as error:
            log.warning("packed weights are neither looked for nor kept: %s", error)
            return PackedModel(self._pack(Follow(layers=self._tell_layers())))
        if (found := self._mapped(key)) is not None:
            return found
        packed, recorded = self._record()
        if state_of(self._checkpoint.files) == state:  # else the key may be that of other files
            self._cache.keep(key, recorded.content(packed.screen))
            return self._mapped(key) or packed  # the pages of the file can be shared, those of this process cannot
        return packed

    def _key(self) -> str:
        """The key of the cache's entry. Windows and positions are left out, because no weight depends on them."""
        content = content_hash(self._checkpoint.files, self._cache.directories)
        description = replace(self._checkpoint.config, layers=(), sink_tokens=0, quantization=None)
        held = self._linears.quantization, self._linears.group, self._linears.holds_super_blocks
        return key_of(content, description, self._checkpoint.shard, self._dtype, held, self._library.version)

    def _mapped(self, key: str) -> PackedModel | None:
        started = time.monotonic()
        content = self._cache.find(key)
        if content is None:
            return None
        parts = KeptParts(self._library, content, self._checkpoint.config)
        try:
            decoder = self._checkpoint.assemble(parts, self._section.max_seq_len, self._dtype, CPU)
            screen = None if decoder.lm_head is None else parts.screen(_packed(decoder.lm_head))
        except DamagedWeights as error:
            log.warning("the kept weights %s are not used, and are made anew: %s", key, error)
            return None
        gigabytes, seconds = content.num_bytes / 1e9, time.monotonic() - started
        self._progress(f"found the packed model: {gigabytes:.1f} GB mapped in {seconds:.1f} s")
        return PackedModel(decoder, screen, content.num_bytes)

    def _record(self) -> tuple[PackedModel, RecordedParts]:
        recorded: list[RecordedParts] = []

        def record(parts: Parts) -> Parts:
            recorded.append(RecordedParts(parts))
            return recorded[0]

        decoder = self._pack(Follow(record, self._tell_layers()))
        return PackedModel(decoder, make_screen(decoder, self._library)), recorded[0]

    def _pack(self, follow: Follow) -> Decoder:
        return self._checkpoint.build(self._section.max_seq_len, self._dtype, CPU, self._linears, follow)

    def _tell_layers(self) -> Callable[[int, int], None]:
        """Tells how many layers are packed, now and then."""
        told = time.monotonic()

        def tell(done: int, of: int) -> None:
            nonlocal told
            if time.monotonic() - told >= QUIET_S and done < of:
                told = time.monotonic()
                self._progress(f"packing the model: {done} of {of} layers")

        return tell


def _packed(lm_head: Linear) -> PackedLinear:
    assert isinstance(lm_head, PackedLinear)
    return lm_head
