"""One checkpoint as the native tier and as the torch tier, each behind a Driver (tests/model/driver.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from backend.api.config.schema import Windows
from backend.layers.linear import LinearByHead, MakeLinear, make_torch_linear
from backend.models.decoder import Decoder
from backend.models.linears import LinearOptions
from backend.models.loader import open_directory
from backend.sampling.sampler import Sampler
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.model_runner import ModelRunner
from backend.worker.native_tier import NativeTier, PackLinears
from backend.worker.state_storage import StateStorage
from backend.worker.tier import Tier, kv_layout
from backend.worker.torch_tier import TorchTier
from kernels.common.kv_format import KV_FORMATS, KVFormat
from kernels.cpu.build import NativeUnavailable
from kernels.cpu.library import load_kernels
from kernels.cpu.linear import RoundToBlocks
from tests.model.driver import Driver

CPU = torch.device("cpu")
SANITIZE = "EVERBATCH_TEST_SANITIZE"  # set for a process of its own, which was started with the sanitizer
NUM_SLOTS = 8


class Format(NamedTuple):
    """What a model is computed in and held in."""

    dtype: str = "float32"
    quantization: str = "none"
    kv: str = "auto"  # an entry of KV_FORMATS
    group: int | None = None  # columns that share a scale of int8 weights
    super_blocks: bool = False  # those of a GGUF file

    def __str__(self) -> str:
        held = "super_blocks" if self.super_blocks else self.quantization
        return "-".join([self.dtype, held, *([f"{self.kv}_kv"] if self.kv != "auto" else [])])

    @property
    def kv_format(self) -> KVFormat:
        return KV_FORMATS[self.kv]


class Attention(NamedTuple):
    """What `kv_cache` says of it."""

    windows: Windows | None = None
    sink_tokens: int = 0


def native_driver(
    directory: Path,
    library: CDLL,
    form: Format,
    block_size: int = 32,
    attention: Attention = Attention(),  # noqa: B008 (immutable)
    **options: object,
) -> Driver:
    """`options` go to the Driver."""
    model = load(directory, form, PackLinears(library), attention)
    return drive(NativeTier(model, library, block_size, form.kv_format), model, library, block_size, **options)


def torch_driver(
    directory: Path,
    form: Format,
    block_size: int = 32,
    attention: Attention = Attention(),  # noqa: B008 (immutable)
    **options: object,
) -> Driver:
    """KV in the model's dtype, whatever `form` says of it."""
    model = load(directory, form, make_torch_linear, attention)
    return drive(TorchTier(model, kv_layout(model.config, block_size, model.dtype)), model, None, block_size, **options)


def drive(tier: Tier, model: Decoder, library: CDLL | None, block_size: int = 32, **options: object) -> Driver:
    """`library` chooses the sampler's kernels."""
    block = tier.kv_block()
    storage = KVStorage(model.config.num_kv_layers, block.shape, block.dtype, CPU)
    batch = InputBatch(NUM_SLOTS, model.max_seq_len, block_size, CPU)
    sampler = Sampler(NUM_SLOTS, model.config.vocab_size, CPU, library)
    options = {"sink_tokens": model.config.sink_tokens, **options}
    states = StateStorage(model.config, NUM_SLOTS, CPU) if model.config.state_bytes else None
    return Driver(ModelRunner(tier, storage, batch, sampler, states=states), block_size, **options)


@cache
def _library_that_rounds() -> CDLL | None:
    try:
        return load_kernels()
    except NativeUnavailable:
        return None


def linear_options(form: Format, make: MakeLinear) -> LinearOptions:
    """One rounding for all tiers and variants, whose weights are the same then: the native one, which is fast, if it is there."""
    of_heads = make if isinstance(make, PackLinears) else LinearByHead
    options = LinearOptions(form.quantization, form.group, make, of_heads, holds_super_blocks=form.super_blocks)
    library = _library_that_rounds()
    if library is None:
        return options
    return options._replace(round_to_blocks=RoundToBlocks(library))


def load(
    directory: Path,
    form: Format,
    make: MakeLinear,
    attention: Attention = Attention(),  # noqa: B008 (immutable)
) -> Decoder:
    checkpoint = open_directory(directory)
    checkpoint.limit_attention(*attention)
    return checkpoint.build(None, getattr(torch, form.dtype), CPU, linear_options(form, make))


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's number of threads, which is also the native kernels'."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
