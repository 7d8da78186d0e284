"""Requests with LoRA adapters over real checkpoints. PEFT is the oracle: greedy tokens, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.api import EngineConfig, ErrorCode, OutputConfig, Request
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.api.lora import LoraConfig
from backend.api.response import PerfMetrics
from backend.executor import Executor
from tests.executor.helpers import drain, tokens_of
from tests.model.adapters import PeftOracle, as_rows, make_adapter
from tests.model.tiers import TORCH, TierCase

PROMPTS = ([5, 6, 7, 8], list(range(20, 60)), [9] * 11, [3, 1, 4, 1, 5, 9, 2, 6])
NUM_TOKENS = 10


def config(tier: TierCase, max_tokens: int = 2048, policy: str = "guaranteed_no_evict", **lora: object) -> EngineConfig:
    return EngineConfig(
        ModelConfigSection(dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1),
        KvCacheConfig(block_size=tier.block, max_tokens=max_tokens),
        SchedulerConfig(max_batch_size=8, max_num_tokens=64, policy=policy),
        lora=LoraSection(**({"enabled": True} | lora)),
    )


def request(prompt: list[int], lora: LoraConfig | None, num_tokens: int = NUM_TOKENS) -> Request:
    output = OutputConfig(exclude_input_from_output=True)
    return Request(prompt, num_tokens, output_config=output, lora=lora, cache_salt="one client")


def run(executor: Executor, *requests: Request) -> list[list[int]]:
    """Greedy tokens of requests that run together."""
    return [tokens for tokens, _ in run_and_account(executor, *requests)]


def run_and_account(executor: Executor, *requests: Request) -> list[tuple[list[int], PerfMetrics]]:
    ids = executor.enqueue_requests(list(requests))
    got = drain(executor, ids)
    for request_id in ids:
        last = got[request_id][-1]
        assert not last.has_error(), last.error_msg
    return [(tokens_of(got[request_id]), got[request_id][-1].account) for request_id in ids]


def error_of(executor: Executor, request: Request) -> tuple[ErrorCode, str]:
    (response,) = drain(executor, [request_id := executor.enqueue_request(request)])[request_id]
    return response.error_code, response.error_msg


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Path]]:
    """Three adapters of a checkpoint: all projections; a rank that is no multiple of 4; two projections, rank-stabilised."""
    made: dict[str, list[Path]] = {}

    def make(name: str) -> list[Path]:
        if name not in made:
            base, root = checkpoint(name), tmp_path_factory.mktemp("adapters")
            made[name] = [
                make_adapter(base, root / "all", 1),
                make_adapter(base, root / "odd", 2, rank=7),
                make_adapter(base, root / "two", 3, rank=16, target_modules=["v_proj", "down_proj"], use_rslora=True),
            ]
        return made[name]

    return make


@pytest.mark.feature("000-19", "002-45")
@pytest.mark.parametrize("name", ["llama2", "llama2_biases_odd_heads", "llama_linear_rope_no_groups", "qwen3"])
def test_rows_with_different_adapters_and_without_one_run_in_one_batch(
    checkpoint: Callable[[str], Path], adapters: Callable[[str], list[Path]], tier: TierCase, name: str
) -> None:
    paths = [*adapters(name), None]
    cases = [(path, prompt) for path in paths for prompt in PROMPTS[:2]]
    expected = [PeftOracle(checkpoint(name), path).greedy(prompt, NUM_TOKENS) for path, prompt in cases]
    assert len({tuple(tokens) for tokens in expected}) == len(cases)  # no adapter does the same as another one
    with Executor.from_directory(checkpoint(name), config(tier)) as executor:
        loras = {path: LoraConfig(index, path=str(path)) for index, path in enumerate(paths[:3])} | {None: None}
        assert run(executor, *(request(prompt, loras[path]) for path, prompt in cases)) == expected
        # The same prompts again, with their KV in the cache and by their ids alone.
        loras = {path: LoraConfig(index) for index, path in enumerate(paths[:3])} | {None: None}
        assert run(executor, *(request(prompt, loras[path]) for path, prompt in reversed(cases))) == expected[::-1]


@pytest.mark.feature("000-19", "001-48")
def test_weights_in_a_request_are_known_by_their_id_afterwards(
    checkpoint: Callable[[str], Path], adapters: Callable[[str], list[Path]], tier: TierCase
) -> None:
    path = adapters("llama2")[0]
    expected = PeftOracle(checkpoint("llama2"), path).greedy(PROMPTS[0], NUM_TOKENS)
    with Executor.from_directory(checkpoint("llama2"), config(tier)) as executor:
        assert run(executor, request(PROMPTS[0], as_rows(path, 5))) == [expected]
        assert run(executor, request(PROMPTS[0], LoraConfig(5))) == [expected]
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(6)))
    assert code is ErrorCode.INVALID_ARGUMENT
    assert message.startswith(
        "LoRA task 6 not found in cache. Please send LoRA weights with request: the host cache holds 1 "
    )


@pytest.mark.feature("000-19")
def test_eviction_and_recomputation_change_nothing(
    checkpoint: Callable[[str], Path], adapters: Callable[[str], list[Path]], tier: TierCase
) -> None:
    """A pool in which few of eight sequences fit: the others are paused, lose their KV, and are computed again."""
    loras = [LoraConfig(index, path=str(path)) for index, path in enumerate(adapters("llama2"))] + [None]
    requests = [request(prompt, lora, 40) for lora in loras for prompt in PROMPTS[:2]]
    with Executor.from_directory(checkpoint("llama2"), config(tier)) as executor:
        expected = [run(executor, each)[0] for each in requests]
    known = [None if lora is None else LoraConfig(lora.task_id) for lora in loras]  # so that nobody waits for a file
    crowd = [request(prompt, lora, 40) for lora in known for prompt in PROMPTS[:2]]
    with Executor.from_directory(checkpoint("llama2"), config(tier, 256, "max_utilization")) as executor:
        run(executor, *(request([1], lora, 1) for lora in loras))
        got = run_and_account(executor, *crowd)
    assert [tokens for tokens, _ in got] == expected
    assert sum(account.num_recomputed_tokens for _, account in got) > 0


@pytest.mark.feature("001-48")
def test_a_name_that_is_loaded_anew_never_meets_the_kv_of_the_old_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path, tier: TierCase
) -> None:
    base = checkpoint("llama2")
    old, new = make_adapter(base, tmp_path / "old", 11), make_adapter(base, tmp_path / "new", 12)
    prompt = PROMPTS[1]
    expected = [PeftOracle(base, path).greedy(prompt, NUM_TOKENS) for path in (old, new)]
    assert expected[0] != expected[1]
    with Executor.from_directory(base, config(tier)) as executor:
        of_old = run(executor, request(prompt, LoraConfig(1, path=str(old))))
        (tmp_path / "new").rename(tmp_path / "moved"), old.rename(tmp_path / "gone"), (tmp_path / "moved").rename(old)
        of_new = run(executor, request(prompt, LoraConfig(1, path=str(old))))
        assert [*of_old, *of_new] == expected
        ((tokens, account),) = run_and_account(executor, request(prompt, LoraConfig(2, path=str(old))))
    assert tokens == expected[1] and account.num_cached_tokens > 0  # another name, the same content: its KV is met


@pytest.mark.feature("001-36")
def test_a_model_that_was_not_prepared_for_lora_refuses(checkpoint: Callable[[str], Path]) -> None:
    with Executor.from_directory(checkpoint("llama2"), config(TORCH, enabled=False)) as executor:
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(3)))
    assert code is ErrorCode.UNSUPPORTED
    assert message == (
        "LoRA is not enabled, the request asks for adapter 3; set lora.enabled=true (in the LLM API enable_lora=True, in "
        "ExecutorConfig a peft_cache_config), or leave it out"
    )


@pytest.mark.feature("001-40")
def test_an_adapter_of_the_highest_rank_fits_and_one_more_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = checkpoint("llama2")
    paths = [make_adapter(base, tmp_path / str(rank), 1, rank=rank, target_modules=["o_proj"]) for rank in (64, 65)]
    with Executor.from_directory(base, config(TORCH)) as executor:
        run(executor, request(PROMPTS[0], LoraConfig(1, path=str(paths[0]))))
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(2, path=str(paths[1]))))
    assert code is ErrorCode.INVALID_ARGUMENT
    assert message == (
        "LoRA adapter 2: it has rank 65 in layer 0, o_proj, the limit is 64 (lora.max_rank); use an adapter of a lower rank, or "
        "ask the server's operator to raise it"
    )


REFUSED = {
    "dora": (dict(use_dora=True), "LoRA adapter 1: adapter_config.json: use_dora is true"),
    "bias": (dict(bias="lora_only"), "bias is lora_only"),
    "head": (dict(target_modules=["lm_head"]), "base_model.model.lm_head."),
    "modules_to_save": (dict(modules_to_save=["lm_head"]), "modules_to_save is"),
    "embedding": (dict(target_modules=["embed_tokens"]), "tensor base_model.model.model.embed_tokens."),
    "tokens": (dict(trainable_token_indices=[1, 2]), "trainable_token_indices is"),
    "pissa": (dict(init_lora_weights="pissa"), "init_lora_weights is pissa, which is not served; train a plain"),
    "alpha as an expression": (
        dict(alpha_pattern={"layers.[01].mlp.up_proj": 3}),
        "is an expression; write module names",
    ),
}


@pytest.mark.feature("000-19")
def test_ranks_and_alphas_of_single_modules_are_pefts(
    checkpoint: Callable[[str], Path], tmp_path: Path, tier: TierCase
) -> None:
    """The first name that fits counts: `self_attn.q_proj` of layer 1 has alpha 90, that of layer 0 has 3."""
    base = checkpoint("llama2")
    patterns = dict(
        rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 16},
        alpha_pattern={"model.layers.1.self_attn.q_proj": 90, "self_attn.q_proj": 3, "down_proj": 32},
    )
    stable = dict(patterns, use_rslora=True)
    paths = [make_adapter(base, tmp_path / str(i), 1, rank=8, **each) for i, each in enumerate((patterns, stable, {}))]
    expected = [PeftOracle(base, path).greedy(PROMPTS[1], NUM_TOKENS) for path in paths]
    assert len({tuple(tokens) for tokens in expected}) == 3
    with Executor.from_directory(base, config(tier)) as executor:
        loras = [LoraConfig(index, path=str(path)) for index, path in enumerate(paths)]
        assert run(executor, *(request(PROMPTS[1], lora) for lora in loras)) == expected


def test_a_convolution_is_refused_by_its_tensor(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = make_adapter(checkpoint("llama2"), tmp_path / "conv", 1)
    path = adapter / "adapter_model.safetensors"
    name = "base_model.model.vision.layers.0.conv.lora_A.weight"
    save_file(load_file(path) | {name: torch.ones(4, 3, 3, 3)}, path)
    with Executor.from_directory(checkpoint("llama2"), config(TORCH)) as executor:
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(1, path=str(adapter))))
    assert code is ErrorCode.UNSUPPORTED
    assert (
        "it has conv, which LlamaForCausalLM does not have, or takes no adapters for; in layer 0 it takes them for "
        in message
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(checkpoint: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    fields, named = REFUSED[case]
    adapter = make_adapter(checkpoint("llama2"), tmp_path / case, 1, **fields)
    with Executor.from_directory(checkpoint("llama2"), config(TORCH)) as executor:
        code, message = error_of(executor, request(PROMPTS[0], LoraConfig(1, path=str(adapter))))
        assert run(executor, request(PROMPTS[0], None))  # and the engine goes on
    assert code is ErrorCode.UNSUPPORTED
    assert named in message


def test_an_adapter_that_can_never_fit_is_refused_with_the_numbers(
    checkpoint: Callable[[str], Path], adapters: Callable[[str], list[Path]]
) -> None:
    lora = LoraConfig(1, path=str(adapters("llama2")[0]))
    with Executor.from_directory(checkpoint("llama2"), config(TORCH, host_bytes=1000)) as executor:
        _, message = error_of(executor, request(PROMPTS[0], lora))
    assert message.endswith(
        "bytes, the host cache has 1000 (lora.host_bytes); use an adapter of a lower rank, or ask the server's operator to raise "
        "it"
    )


@pytest.mark.feature("001-48")
def test_the_adapter_that_was_used_least_recently_goes_first(
    checkpoint: Callable[[str], Path], tmp_path: Path, tier: TierCase
) -> None:
    """A cache of two and a half adapters: with the third one, the one that nobody used for longest goes."""
    base = checkpoint("llama2")
    paths = [make_adapter(base, tmp_path / str(seed), seed) for seed in range(3)]
    with Executor.from_directory(base, config(tier)) as executor:
        run(executor, request(PROMPTS[0], LoraConfig(0, path=str(paths[0]))))
        size = executor.engine_core.adapters.host.num_bytes if hasattr(executor, "engine_core") else 0
    size = size or sum(each.num_bytes for each in _prepared(base, tier, paths[:1]))
    with Executor.from_directory(base, config(tier, host_bytes=size * 5 // 2)) as executor:
        first = [run(executor, request(PROMPTS[0], LoraConfig(i, path=str(paths[i])))) for i in (0, 1)]
        assert run(executor, request(PROMPTS[0], LoraConfig(0))) == first[0]
        run(executor, request(PROMPTS[0], LoraConfig(2, path=str(paths[2]))))
        assert "LoRA task 1 not found" in error_of(executor, request(PROMPTS[0], LoraConfig(1)))[1]
        assert run(executor, request(PROMPTS[0], LoraConfig(0))) == first[0]
        assert run(executor, request(PROMPTS[0], LoraConfig(1, path=str(paths[1])))) == first[1]


def _prepared(base: Path, tier: TierCase, paths: list[Path]) -> list:
    from backend.worker.group import InProcessWorkerGroup

    whole = config(tier)
    model = msgspec.structs.replace(whole.model, path=str(base))
    group = InProcessWorkerGroup(model, whole.scheduler, whole.kv_cache, lora=whole.lora)
    group.load()
    return [group.prepare_adapter(LoraConfig(0, path=str(path))) for path in paths]
