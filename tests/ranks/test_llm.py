"""The Python LLM API over several ranks: streams, guides and logits processors are rank 0's affair and stay the same."""

from __future__ import annotations

import re

import pytest

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from compat.llm import LLM, GuidedDecodingParams, SamplingParams

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
CONFIG = EngineConfig(ModelConfigSection(num_threads=2, device="cpu"), KvCacheConfig(max_tokens=4096))
PROMPTS = ["Once upon a time", "The little dog ran to"]


def texts(size: int) -> list[object]:
    """Of the default model: streamed texts, and one of a regular expression."""
    greedy = SamplingParams(max_tokens=24)
    guided = SamplingParams(
        max_tokens=24, temperature=1.0, top_k=50, seed=3, guided_decoding=GuidedDecodingParams(regex="[a-c ]{4,8}[.]")
    )
    with LLM(tensor_parallel_size=size, engine_config=CONFIG) as llm:
        streams = [llm.generate_async(prompt, greedy, streaming=True) for prompt in PROMPTS]
        told = [[each.outputs[0].text for each in stream] for stream in streams]
        return [*told, llm.generate(PROMPTS[0], guided).outputs[0].text]


@pytest.mark.feature("004-24")
def test_streams_and_guides_are_those_of_one_rank() -> None:
    *streams, guided = texts(2)
    assert all(len(stream) > 10 for stream in streams)
    assert re.fullmatch("[a-c ]{4,8}[.]", guided)
    assert [*(stream[-1] for stream in streams), guided] == [
        each[-1] if isinstance(each, list) else each for each in texts(1)
    ]
