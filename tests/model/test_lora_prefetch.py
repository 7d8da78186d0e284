"""Adapters that are read at the start (`lora.prefetch_dir`), through TensorRT-LLM's bindings. PEFT is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from backend.api import ConfigError, EngineConfig
from backend.api.config.schema import ModelConfigSection
from backend.api.lora import LoraConfig
from backend.executor import Executor
from compat import trtllm
from tests.executor.helpers import drain, tokens_of
from tests.fakes.adapter_files import write_adapter
from tests.model.adapters import PeftOracle, as_rows, make_adapter
from tests.model.test_lora import NUM_TOKENS, PROMPTS, config, error_of, request, run
from tests.model.tiers import TORCH


def write_rows(adapter: Path, directory: Path) -> None:
    """As TensorRT-LLM's hf_lora_convert.py does, with a batch dimension."""
    directory.mkdir()
    rows = as_rows(adapter, 0)
    assert rows.weights is not None
    weights = np.frombuffer(rows.weights.data, np.float32).reshape(rows.weights.shape)
    np.save(directory / "model.lora_weights.npy", weights[None])
    np.save(directory / "model.lora_config.npy", np.array([rows.config], np.int32))


@pytest.fixture(scope="module")
def base(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama2")


@pytest.fixture(scope="module")
def prefetched(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapter 7 as PEFT writes it, and 18446744073709551615 as TensorRT-LLM does; a folder and a file of other names."""
    root = tmp_path_factory.mktemp("prefetched")
    make_adapter(base, root / "7", 1)
    write_rows(make_adapter(base, root / "notes", 2), root / str((1 << 64) - 1))
    (root / "README").write_text("adapters")
    return root


@pytest.mark.feature("000-19", "001-48")
def test_ids_of_the_directory_are_known_to_the_first_request_and_to_events(base: Path, prefetched: Path) -> None:
    """Three requests of 20 tokens and more: whole blocks of 16 each, of KV that belongs to an adapter, or to none (None)."""
    settings = trtllm.ExecutorConfig(
        peft_cache_config=trtllm.PeftCacheConfig(lora_prefetch_dir=str(prefetched)),
        kv_cache_config=trtllm.KvCacheConfig(max_tokens=512, event_buffer_max_size=100),
    )
    settings.engine_config = EngineConfig(ModelConfigSection(dtype="float32", kernels="torch", device="cpu"))
    last = (1 << 64) - 1
    adapters = {7: prefetched / "7", last: prefetched / "notes", None: None}
    with trtllm.Executor(base, trtllm.ModelType.DECODER_ONLY, settings) as executor:
        for task_id, adapter in adapters.items():
            lora = None if task_id is None else trtllm.LoraConfig(task_id)
            prompt = list(range(20, 60))
            request_id = executor.enqueue_request(trtllm.Request(prompt, NUM_TOKENS, lora_config=lora))
            (response,) = executor.await_responses(request_id)
            tokens = response.result.output_token_ids[0]
            assert tokens == prompt + PeftOracle(base, adapter).greedy(prompt, NUM_TOKENS)
        events = executor.get_kv_cache_event_manager().get_latest_events(timedelta(seconds=30))
    stored = [event.data for event in events if isinstance(event.data, trtllm.kv_cache.KVCacheStoredData)]
    assert list(dict.fromkeys(block.lora_id for data in stored for block in data.blocks)) == [7, last, None]


def test_every_client_knows_them_until_it_gives_the_id_to_another(base: Path, prefetched: Path, tmp_path: Path) -> None:
    own = make_adapter(base, tmp_path / "own", 3)
    expected = {path: PeftOracle(base, path).greedy(PROMPTS[0], NUM_TOKENS) for path in (prefetched / "7", own)}
    with Executor.from_directory(base, config(TORCH, prefetch_dir=str(prefetched))) as executor:
        assert run(executor, request(PROMPTS[0], LoraConfig(7, path=str(own)))) == [expected[own]]
        assert run(executor, request(PROMPTS[0], LoraConfig(7))) == [expected[own]]
        other = msgspec.structs.replace(request(PROMPTS[0], LoraConfig(7)), cache_salt="another client")
        (responses,) = drain(executor, [executor.enqueue_request(other)]).values()
        assert tokens_of(responses) == expected[prefetched / "7"]
        assert "LoRA task 8 not found in cache" in error_of(executor, request(PROMPTS[0], LoraConfig(8)))[1]


def refusal(base: Path, directory: Path, **lora: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Executor.from_directory(base, config(TORCH, prefetch_dir=str(directory), **lora)).shutdown()
    return str(caught.value)


def test_what_cannot_be_read_or_held_ends_the_start_with_a_sentence(
    base: Path, prefetched: Path, tmp_path: Path
) -> None:
    assert refusal(base, tmp_path / "none").endswith("none: Directory does not exist")
    missing = refusal(base, prefetched, allowed_dir=str(tmp_path / "none"))
    assert missing.startswith("lora.allowed_dir is ") and missing.endswith("does not exist; make it, or give another")
    assert "and LoRA is not enabled; set lora.enabled=true" in refusal(base, prefetched, enabled=False)
    too_many = refusal(base, prefetched, host_bytes=150_000)  # each takes a page of 98 KiB
    assert too_many.startswith(f"lora.prefetch_dir: folder {(1 << 64) - 1}: the LoRA adapters up to this one take")
    (tmp_path / "dora").mkdir()
    (tmp_path / "dora" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    named = refusal(base, prefetched, adapters=(f"doll={tmp_path / 'dora'}",))
    assert named.startswith(f"lora.adapters: doll={tmp_path / 'dora'}: adapter_config.json: use_dora is true, which is")
    for name, fields, sentence in (
        ("head", dict(module="lm_head"), "tensor base_model.model.lm_head.lora_A.weight is no LoRA of a decoder layer"),
        ("high", dict(rank=65), "it has rank 65 in layer 0, q_proj, the limit is 64 (lora.max_rank); use an adapter"),
        ("other", {}, "LoRA adapter 'other': adapter_model.safetensors: layer 0, q_proj: lora_A has shape [4, 16]"),
    ):
        write_adapter(tmp_path / "named" / name, **fields)
        told = refusal(base, prefetched, adapters=(f"{name}={tmp_path}/named/{name}",))
        assert told.startswith(f"lora.adapters: {name}={tmp_path}/named/{name}: ") and sentence in told
    write_adapter(tmp_path / "many" / "6", module="lm_head")
    assert "folder 6: LoRA adapter 6: adapter_model.safetensors: tensor " in refusal(base, tmp_path / "many")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "5").mkdir()
    assert refusal(base, tmp_path / "one") == (
        "lora.prefetch_dir: folder 5: LoRA adapter 5: 5: adapter_config.json: File does not exist; put a PEFT adapter there, or "
        "name another one"
    )


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("model.lora_weights.npy", np.zeros((1, 2, 3), np.int8), "lora_weights are int8, one of float16"),
        ("model.lora_config.npy", np.zeros((1, 2, 3), np.float32), "float32 of shape [2, 3], integers [rows, 3] are"),
        ("model.lora_weights.npy", np.array([{}], object), "model.lora_weights.npy is no array of numbers"),
        ("model.lora_weights.npy", None, "model.lora_weights.npy: File does not exist"),
    ],
)
def test_files_of_rows_are_checked_like_the_tensors_of_a_request(
    base: Path, prefetched: Path, tmp_path: Path, name: str, array: np.ndarray | None, message: str
) -> None:
    write_rows(prefetched / "notes", tmp_path / "1")
    if array is None:
        (tmp_path / "1" / name).unlink()
    else:
        np.save(tmp_path / "1" / name, array, allow_pickle=True)
    assert message in refusal(base, tmp_path)
