"""Which kernels a model gets: chosen by the configuration and the machine, told in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from backend.api import ConfigError
from backend.api.config.kv_bits import KV_TYPES, kv_bits, named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.core.step import ModelInfo
from backend.models import loader
from backend.models.config import read_model_config
from backend.worker import tier
from backend.worker.group import InProcessWorkerGroup
from backend.worker.kv_fingerprint import kv_fingerprint
from backend.worker.loaded_model import LoadedModel, linear_options
from backend.worker.tier import KVBlock
from kernels.common.kv_format import KV_FORMATS
from kernels.cpu.build import CACHE_VARIABLE
from kernels.cpu.isa import ISA_VARIABLE, best_isa, supported_isas
from kernels.cpu.library import load_kernels

CUDA = "the device is cuda, and they are for CPUs"
HEAD_DIM = 8  # head dimension of the checkpoint
LOST = (
    "the last bits of a reply may then depend on the requests beside it and on evictions, and with them a token, and steps are "
    "slower, often by a factor of 2 to 3"
)


def load(directory: Path, kv_cache: dict[str, object], **fields: object) -> ModelInfo:
    section = ModelConfigSection(path=str(directory), num_threads=1, device="cpu", **fields)
    return InProcessWorkerGroup(section, SchedulerConfig(max_batch_size=2), KvCacheConfig(**kv_cache)).load()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Tells the lines of the worker's log so far, but warnings and the line on what the weights take."""
    caplog.set_level(logging.INFO, logger="everbatch.worker")
    told = lambda: [record for record in caplog.records if record.name == "everbatch.worker"]
    lines = lambda: [record.getMessage() for record in told() if record.levelno == logging.INFO]
    return lambda: [line for line in lines() if not line.startswith("weights: ")]


def sentence(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


@pytest.mark.parametrize("kernels", ["auto", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_gets_the_native_kernels(
    checkpoint: Callable[[str], Path], native_kernels: None, lines: Callable[[], list[str]], kernels: str, dtype: str
) -> None:
    assert load(checkpoint("llama2"), {}, kernels=kernels, dtype=dtype).kernels == "native"
    assert lines() == [f"kernels: native, for {best_isa()}"]


@pytest.mark.skipif("avx2" not in supported_isas()[1:], reason="needs a machine with more than AVX2")
def test_a_compiler_that_knows_less_than_the_machine_is_named(
    checkpoint: Callable[[str], Path], lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "load_kernels", lambda progress: load_kernels("avx2", progress))
    assert load(checkpoint("llama2"), {}).kernels == "native"
    assert lines() == [f"kernels: native, for avx2; the compiler does not know {best_isa()}, a newer g++ would"]


def test_the_torch_tier_is_had_for_the_asking(
    checkpoint: Callable[[str], Path], lines: Callable[[], list[str]]
) -> None:
    info = load(checkpoint("llama2"), {"block_size": 8}, kernels="torch", dtype="float16")
    assert (info.kernels, info.dtype, info.kv_block_size) == ("torch", "float16", 0), "it takes any of them"
    assert lines() == ["kernels: torch, because model.kernels is torch"]
    assert info.remarks == (f"the model runs on torch operators, because model.kernels is torch: {LOST}",)


@pytest.mark.parametrize("kernels", ["auto", "native"])
@pytest.mark.parametrize("wanted, used", [(1, 32), (8, 32), (16, 32), (32, 32), (64, 64)])
def test_the_native_kernels_raise_small_blocks_and_say_so(
    checkpoint: Callable[[str], Path],
    native_kernels: None,
    caplog: pytest.LogCaptureFixture,
    kernels: str,
    wanted: int,
    used: int,
) -> None:
    caplog.set_level(logging.WARNING, logger="everbatch.worker")
    info = load(checkpoint("llama2"), {"block_size": wanted}, kernels=kernels)
    assert info.kernels == "native"
    assert info.kv_block_size == (used if used != wanted else 0)
    assert info.kv_bytes_per_token == 3 * 2 * 2 * 32 * 4, "layers, key and value, kv heads, padded head, bytes"
    told = (
        f"kv_cache.block_size is {wanted}, and the native kernels hold KV in blocks of at least 32 tokens: "
        f"it is 32 in this server"
    )
    assert info.remarks == ((told,) if used != wanted else ())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [*info.remarks]


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_a_float16_model_is_computed_in_float32_and_that_is_said(
    checkpoint: Callable[[str], Path], native_kernels: None, kernels: str
) -> None:
    info = load(checkpoint("llama2"), {}, kernels=kernels, dtype="float16")
    assert (info.kernels, info.dtype) == ("native", "float32")
    (remark,) = info.remarks
    assert remark.startswith("the model is float16, and the native kernels compute it in float32")
    assert "--set model.dtype=bfloat16" in remark


def test_a_model_that_runs_as_it_is_configured_needs_no_remark(
    checkpoint: Callable[[str], Path], native_kernels: None
) -> None:
    assert load(checkpoint("llama2"), {}, additional_outputs=("hidden_states",)).remarks == ()


@pytest.mark.parametrize("kv, bits", [("int8", 8), ("int4", 4), ("k8v4", 6)])
def test_quantised_kv_on_the_torch_tier_takes_its_bits_and_two_halves_a_head(
    checkpoint: Callable[[str], Path], kv: str, bits: int
) -> None:
    heads = 3 * 2 * 2  # layers, key and value, kv heads
    info = load(checkpoint("llama2"), named(kv), kernels="torch")
    assert info.kv_bytes_per_token == heads * (HEAD_DIM * bits // 8 + 4)


@pytest.mark.parametrize("keys, values", [("int4", "int8"), ("int8", None), (None, "int4")])
def test_a_pair_of_types_that_no_kernel_has_is_refused(
    checkpoint: Callable[[str], Path], keys: str | None, values: str | None
) -> None:
    with pytest.raises(ConfigError) as error:
        load(checkpoint("llama2"), {"key_dtype": keys, "value_dtype": values})
    assert sentence(error) == (
        f"kv_cache.key_dtype is {keys or 'auto'} and kv_cache.value_dtype {values or 'auto'}, and kernels have int8 with int8, "
        f"int4 with int4, int8 with int4 only; set both to one of these pairs, or neither"
    )


def test_a_type_of_one_side_goes_before_that_of_both(checkpoint: Callable[[str], Path]) -> None:
    both, one = ({"dtype": "int8", **one} for one in ({}, {"value_dtype": "int4"}))
    half = 3 * 2 * HEAD_DIM // 2  # layers, kv heads, bytes that a value of four bits saves
    infos = [load(checkpoint("llama2"), kv_cache, kernels="torch") for kv_cache in (both, one)]
    assert infos[0].kv_bytes_per_token - infos[1].kv_bytes_per_token == half
    assert kv_bits(KvCacheConfig(value_dtype="int4"), "int8") == (8, 4), "where the checkpoint says of both"


def test_every_name_means_the_same_to_the_configuration_and_to_the_kernels() -> None:
    assert {name: kv_bits(KvCacheConfig(**named(name)), None) for name in KV_TYPES} == KV_FORMATS


def test_the_fingerprint_of_kv_is_of_keys_and_of_values(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where blocks have one size."""
    monkeypatch.setattr(LoadedModel, "kv_block", lambda *_: KVBlock((1,), torch.uint8))
    opened = loader.open_directory(checkpoint("llama2"))
    section = ModelConfigSection(path=str(checkpoint("llama2")), device="cpu", kernels="torch")
    found = [
        kv_fingerprint(
            opened, LoadedModel(opened, section, KvCacheConfig(**named(name)), torch.device("cpu")), section, 32
        )
        for name in KV_TYPES
    ]
    assert len({*found}) == len(KV_TYPES)


def test_the_fingerprint_of_kv_changes_with_what_a_quantised_pool_holds(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of an older version lack the rotation that queries now have."""
    opened = loader.open_directory(checkpoint("llama2"))
    section = ModelConfigSection(path=str(checkpoint("llama2")), device="cpu", kernels="torch")
    loaded = LoadedModel(opened, section, KvCacheConfig(dtype="int8"), torch.device("cpu"))
    now = kv_fingerprint(opened, loaded, section, 32)
    monkeypatch.setattr("backend.worker.kv_fingerprint.KV_NUMBERS", 1)
    assert kv_fingerprint(opened, loaded, section, 32) != now


def test_triton_kernels_are_refused_on_a_cpu(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as error:
        load(checkpoint("llama2"), {}, kernels="triton")
    assert sentence(error) == (
        "model.kernels is triton, which cannot be had: the device is cpu, and they are for CUDA devices"
    )


@pytest.mark.parametrize(
    "block_size, head_dim, reason",
    [
        (8, 64, "kv_cache.block_size is 8; use one of 16, 32, 64, 128"),
        (32, 36, "the head dimension is 36, no multiple of 8"),
    ],
)
def test_a_gpu_gets_the_triton_kernels_unless_they_do_not_fit(
    checkpoint: Callable[[str], Path],
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    head_dim: int,
    reason: str,
) -> None:
    monkeypatch.setattr(tier, "runs_at", lambda device: device.type == "cuda")
    assert choose(checkpoint, device="cuda", head_dim=64).name == "triton"
    assert choose(checkpoint, device="cuda", head_dim=head_dim, block_size=block_size).name == "torch"
    assert lines() == ["kernels: triton, on cuda", f"kernels: torch, because {reason}"]


@pytest.mark.parametrize("kv, fraction", [("int8", 4), ("int4", 8), ("k8v4", 16 / 3)])
def test_quantised_kv_takes_its_share_of_float32_and_its_scales(
    checkpoint: Callable[[str], Path], native_kernels: None, kv: str, fraction: float
) -> None:
    infos = {name: load(checkpoint("llama2"), named(name)) for name in ("auto", kv)}
    assert infos[kv].kernels == "native"
    scales = 3 * 2 * 2 * 4  # layers, key and value, kv heads; a float32 scale, or scale and least in float16
    assert infos[kv].kv_bytes_per_token == infos["auto"].kv_bytes_per_token / fraction + scales


def choose(
    checkpoint: Callable[[str], Path], device: str = "cpu", head_dim: int = 8, block_size: int = 32, **fields: object
) -> tier.TierChoice:
    config = msgspec.structs.replace(read_model_config(checkpoint("llama2")), head_dim=head_dim)
    section = ModelConfigSection(device=device, **fields)
    kv_cache = KvCacheConfig(block_size=block_size)
    return tier.choose_tier(section, kv_cache, torch.device(device), config, lambda line: None)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(device="cuda"), "the device is cuda, and they are for CUDA devices"),  # this torch has none
        (dict(head_dim=1026), "the head dimension is 1026, more than 1024"),
    ],
)
def test_other_devices_and_huge_heads_are_the_torch_tier_s(
    checkpoint: Callable[[str], Path], lines: Callable[[], list[str]], options: dict[str, int | str], reason: str
) -> None:
    assert choose(checkpoint, **options) == tier.TierChoice("torch", reason=reason)
    assert lines() == [f"kernels: torch, because {reason}"]
    with pytest.raises(ConfigError) as error:
        choose(checkpoint, kernels="native", **options)
    assert (
        sentence(error) == f"model.kernels is native, which cannot be had: {CUDA if options.get('device') else reason}"
    )


def test_a_machine_without_a_compiler_is_told_what_would_help(
    checkpoint: Callable[[str], Path], lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert load(checkpoint("llama2"), {}).kernels == "torch"
    (line,) = lines()
    assert line.startswith("kernels: torch, because CXX names '/no/such/compiler'")
    with pytest.raises(ConfigError) as error:
        load(checkpoint("llama2"), {}, kernels="native")
    assert "unset it or set it to a C++ compiler" in sentence(error)


def test_a_forced_instruction_set_that_is_not_there_is_refused_even_if_any_would_do(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "neon")
    with pytest.raises(ConfigError) as error:
        load(checkpoint("llama2"), {})
    assert sentence(error).startswith(f"{ISA_VARIABLE} is 'neon', this machine can run ")


@pytest.mark.parametrize("quantization", ["w4a8", "w6a8", "auto:5"])
def test_a_gpu_has_no_rounding_to_blocks(quantization: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{quantization}, which rounds weights for a CPU; on a GPU use w8a8, or a checkpoint that"
    ):
        linear_options(tier.TierChoice("triton"), quantization, torch.bfloat16)
