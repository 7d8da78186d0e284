"""With two ranks, too, a token has the same bits whatever ran beside it, however its prompt was cut, and after an eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from backend.api import OutputConfig, Request, SamplingConfig, TensorData
from backend.api.config.schema import EngineConfig, LoraSection
from backend.api.lora import LoraConfig
from backend.engine.core import EngineCore
from backend.executor.load import workers_of
from backend.scheduler.plan import StepPlan
from backend.worker.kv_storage import KVStorage
from tests.families.tiny import VOCAB
from tests.model.adapters import make_adapter
from tests.native.harness import Format, prompt
from tests.ranks.conftest import SIZES
from tests.ranks.harness import PROMPTS, Ran, engine_config, run

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
Checkpoint = Callable[..., Path]
FORMATS = [
    Format(),
    Format("bfloat16"),
    Format("bfloat16", "w8a8", kv="int8"),
    Format("bfloat16", "w4a8", kv="int4"),
    Format("bfloat16", kv="k8v4"),
]
ENABLED = LoraSection(enabled=True)


def assert_same(one: Ran, other: Ran) -> None:
    assert one.tokens == other.tokens
    for a, b in zip(one.logits, other.logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.feature("002-37")
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_bits_do_not_depend_on_eviction_chunks_or_company(checkpoint: Checkpoint, form: Format) -> None:
    directory = checkpoint("llama", form.dtype)
    plain = run(engine_config(directory, 2, form))
    assert len({token for tokens in plain.tokens for token in tokens}) > 5, "tokens that hardly change prove nothing"
    assert_same(run(engine_config(directory, 2, form), evict_every=4), plain)
    assert_same(run(engine_config(directory, 2, form, max_num_tokens=16)), plain)
    alone = run(engine_config(directory, 2, form), PROMPTS[:1])
    assert_same(alone, Ran(plain.tokens[:1], plain.logits[:1]))


def test_kv_that_was_swapped_out_comes_back_on_every_rank(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = engine_config(checkpoint("llama"), 2)
    pool = replace(base.kv_cache, max_tokens=32 * 7, swap_bytes=1 << 22, watermark=0.0)
    config = replace(base, kv_cache=pool, scheduler=replace(base.scheduler, preemption="swap"))
    moved: dict[KVStorage, Counter[str]] = {}
    for name in ("swap_out", "swap_in"):
        plain = getattr(KVStorage, name)

        def moves(storage: KVStorage, pairs: Sequence[tuple[int, int]], name: str = name, do: Any = plain) -> None:
            moved.setdefault(storage, Counter())[name] += len(pairs)
            do(storage, pairs)

        monkeypatch.setattr(KVStorage, name, moves)
    swapped = run(config, num_tokens=40)
    assert len(moved) == 2 and all(counts == Counter(swap_out=4, swap_in=2) for counts in moved.values())
    assert_same(swapped, run(base, num_tokens=40))


def test_an_adapter_is_cut_as_the_layers_that_it_adds_to(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama", attention_bias=False, mlp_bias=False)
    adapter = LoraConfig(7, path=str(make_adapter(directory, tmp_path / "adapter", seed=3)))
    fields = dict(lora=adapter, cache_salt="one client")
    one = run(engine_config(directory, 1, lora=ENABLED), **fields)
    two = run(engine_config(directory, 2, lora=ENABLED), **fields)
    assert one.tokens == two.tokens != run(engine_config(directory, 2)).tokens
    assert_same(run(engine_config(directory, 2, lora=ENABLED), evict_every=4, **fields), two)


def test_prompts_that_bring_embeddings_and_positions(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    table = torch.randn(4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
    ids = [3, 1, VOCAB, 4, VOCAB + 1, VOCAB + 2, 1, 5, VOCAB + 3]
    fields = dict(
        prompt_embeddings=TensorData("float32", tuple(table.shape), table.numpy().tobytes()),
        position_ids=[0, 1, 2, 2, 3, 3, 4, 5, 6],
    )
    one, two = (run(engine_config(directory, size), [ids], **fields) for size in (1, 2))
    assert one.tokens == two.tokens != run(engine_config(directory, 2), [[3, 1, 4, 1, 5]]).tokens
    assert_same(run(engine_config(directory, 2), [ids], evict_every=3, **fields), two)


def outputs(
    config: EngineConfig,
    request: Request,
    evict_every: int | None = None,
    at_end: Callable[[EngineCore], None] = lambda core: None,
) -> Mapping[int, list[list[int]]]:
    """The tokens of each sequence of a request, by its index; of a search those of each beam."""
    workers, found = workers_of(config), dict[int, list[list[int]]]()
    try:
        core = EngineCore(config, workers)
        core.enqueue(1, request)
        for step in range(1000):
            if not core.has_work:
                break
            if evict_every and step % evict_every == evict_every - 1:
                plan = StepPlan(core.kv.plan())
                for seq in reversed(core.scheduler.running):
                    plan.kv.pause(seq)
                core.scheduler.commit(plan, step_id=-1, now_ns=0)
                core.kv.lose_everything()
            for response in core.step():
                assert not response.has_error(), response.error_msg
                found[response.result.sequence_index] = response.result.output_token_ids
            core.check_integrity()
        at_end(core)
    finally:
        workers.shutdown()
    return found


@pytest.mark.parametrize(
    "several",
    [SamplingConfig(num_return_sequences=3, temperature=1.0, seed=5), SamplingConfig(beam_width=3)],
    ids=["sequences", "beams"],
)
def test_several_outputs_of_one_prompt_are_those_of_one_rank(checkpoint: Checkpoint, several: SamplingConfig) -> None:
    directory = checkpoint("qwen2")
    request = Request(
        prompt(45, VOCAB), 12, sampling_config=several, output_config=OutputConfig(exclude_input_from_output=True)
    )
    one, two = (outputs(engine_config(directory, size), request) for size in (1, 2))
    assert one == two
    assert len({tuple(tokens) for each in two.values() for tokens in each}) == 3
    assert outputs(engine_config(directory, 2), request, evict_every=11) == two


def test_draft_tokens_are_verified_by_all_ranks(checkpoint: Checkpoint) -> None:
    config, accepted = engine_config(checkpoint("llama"), 2), []
    request = Request(prompt(45, VOCAB), 12, output_config=OutputConfig(exclude_input_from_output=True))
    plain = outputs(config, request)
    (tokens,) = plain[0]
    wrong = (tokens[4] + 1) % VOCAB
    drafted = replace(request, draft_tokens=[*tokens[:4], wrong])
    found = outputs(config, drafted, at_end=lambda core: accepted.append(core.counters.accepted_draft_tokens_total))
    assert found == plain
    assert accepted == [3]  # of four right ones; the first is the token that the prompt's own step yields
