"""What sequences can do is rank 0's affair, and is with stages what it is with one rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from backend.api import AdditionalOutput, EngineConfig, OutputConfig, Request, SamplingConfig, TensorData
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SpeculationConfig
from backend.api.lora import LoraConfig
from backend.engine.core import EngineCore
from backend.executor.load import workers_of
from compat.llm import LLM, GuidedDecodingParams, SamplingParams
from tests.families.tiny import VOCAB
from tests.model.adapters import make_adapter
from tests.native.harness import Format, prompt
from tests.ranks.conftest import SIZES
from tests.ranks.harness import PROMPTS, Ran, engine_config, run
from tests.ranks.test_invariance import assert_same, outputs

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
Checkpoint = Callable[..., Path]
OUTPUT = OutputConfig(exclude_input_from_output=True)
QUANTISED = Format("bfloat16", "w8a8", kv="int8")


def of_both(directory: Path, **fields: object) -> tuple[EngineConfig, EngineConfig]:
    """One rank, and two stages that work on two micro-batches."""
    return engine_config(directory, 1, **fields), engine_config(directory, 1, stages=2, micro_batches=2, **fields)


def test_bits_do_not_depend_on_eviction_chunks_or_company(checkpoint: Checkpoint) -> None:
    one, stages = of_both(checkpoint("llama", "bfloat16"), form=QUANTISED)
    plain = run(one)
    assert_same(run(stages, evict_every=4), plain)
    chunked = replace(stages, scheduler=replace(stages.scheduler, max_num_tokens=16))
    assert_same(run(chunked), plain)
    assert_same(run(stages, PROMPTS[:1]), Ran(plain.tokens[:1], plain.logits[:1]))


def test_layers_of_different_windows_keep_theirs_on_their_stages(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    one, stages = of_both(directory)
    windows = KvCacheConfig(block_size=32, max_tokens=32 * 100, max_attention_window=(8, 48, 16), sink_tokens=4)
    one, stages = (replace(each, kv_cache=windows) for each in (one, stages))
    plain = run(one, num_tokens=40)
    assert plain.tokens != run(engine_config(directory, 1), num_tokens=40).tokens
    assert_same(run(stages, num_tokens=40, evict_every=9), plain)


def test_an_adapter_s_layers_go_to_their_stages(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama", attention_bias=False, mlp_bias=False)
    adapter = LoraConfig(7, path=str(make_adapter(directory, tmp_path / "adapter", seed=3)))
    fields = dict(lora=adapter, cache_salt="one client")
    one, stages = of_both(directory, lora=LoraSection(enabled=True))
    plain = run(one, **fields)
    assert plain.tokens != run(one).tokens
    assert_same(run(stages, evict_every=4, **fields), plain)


def test_prompts_that_bring_embeddings_and_positions(checkpoint: Checkpoint) -> None:
    table = torch.randn(4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
    ids = [3, 1, VOCAB, 4, VOCAB + 1, VOCAB + 2, 1, 5, VOCAB + 3]
    fields = dict(
        prompt_embeddings=TensorData("float32", tuple(table.shape), table.numpy().tobytes()),
        position_ids=[0, 1, 2, 2, 3, 3, 4, 5, 6],
    )
    one, stages = of_both(checkpoint("llama"))
    assert_same(
        run(stages, [ids, ids[:5]], **{**fields, "position_ids": None}),
        run(one, [ids, ids[:5]], **{**fields, "position_ids": None}),
    )
    assert_same(run(stages, [ids], **fields), run(one, [ids], **fields))


@pytest.mark.parametrize(
    "several",
    [SamplingConfig(num_return_sequences=3, temperature=1.0, seed=5), SamplingConfig(beam_width=3)],
    ids=["sequences", "beams"],
)
def test_several_outputs_of_one_prompt(checkpoint: Checkpoint, several: SamplingConfig) -> None:
    one, stages = of_both(checkpoint("qwen2"))
    request = Request(prompt(45, VOCAB), 12, sampling_config=several, output_config=OUTPUT)
    expected = outputs(one, request)
    assert len({tuple(tokens) for each in expected.values() for tokens in each}) == 3
    assert outputs(stages, request, evict_every=11) == expected


def test_draft_tokens_and_a_draft_model(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    one, stages = of_both(directory)
    request = Request(prompt(45, VOCAB), 12, output_config=OUTPUT)
    plain = outputs(one, request)
    (tokens,) = plain[0]
    accepted: list[int] = []
    drafted = replace(request, draft_tokens=[*tokens[:4], (tokens[4] + 1) % VOCAB])
    note = lambda core: accepted.append(core.counters.accepted_draft_tokens_total)
    assert outputs(stages, drafted, at_end=note) == plain
    guessing = replace(stages, speculation=SpeculationConfig("draft_model", str(directory)))
    assert outputs(guessing, request, at_end=note) == plain
    assert accepted[0] == 3 and accepted[1] > 3


def test_logits_and_hidden_states_that_clients_ask_for(checkpoint: Checkpoint) -> None:
    asked = OutputConfig(
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs=(AdditionalOutput("hidden_states", True),),
    )
    request, found = Request(prompt(45, VOCAB), 5, output_config=asked), []
    for config in of_both(checkpoint("llama")):
        model = replace(
            config.model,
            gather_context_logits=True,
            gather_generation_logits=True,
            additional_outputs=("hidden_states",),
        )
        workers = workers_of(replace(config, model=model))
        try:
            core = EngineCore(replace(config, model=model), workers)
            core.enqueue(1, request)
            responses = [response for _ in range(20) if core.has_work for response in core.step()]
        finally:
            workers.shutdown()
        found.append(responses[-1].result)
    one, stages = found
    assert stages.context_logits.shape == (45, VOCAB)
    assert stages.additional_context_outputs["hidden_states"].shape == (45, SIZES["hidden_size"])
    for name in ("output_token_ids", "context_logits", "generation_logits", "additional_outputs"):
        assert getattr(stages, name) == getattr(one, name)
    assert stages.additional_context_outputs == one.additional_context_outputs


def test_streams_and_guides_of_the_python_api() -> None:
    config = EngineConfig(ModelConfigSection(num_threads=2, device="cpu"), KvCacheConfig(max_tokens=4096))
    guided = SamplingParams(
        max_tokens=24, temperature=1.0, top_k=50, seed=3, guided_decoding=GuidedDecodingParams(regex="[a-c ]{4,8}[.]")
    )
    texts = []
    for stages in (1, 2):
        with LLM(pipeline_parallel_size=stages, engine_config=config) as llm:
            stream = [
                each.outputs[0].text
                for each in llm.generate_async("Once upon a time", SamplingParams(max_tokens=24), streaming=True)
            ]
            assert len(stream) > 10
            texts.append((stream[-1], llm.generate("Once upon a time", guided).outputs[0].text))
    assert texts[0] == texts[1]
    assert re.fullmatch("[a-c ]{4,8}[.]", texts[1][1])
