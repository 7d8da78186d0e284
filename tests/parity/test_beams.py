"""Beams equal those of transformers' `generate(num_beams=k)`, on both tiers, alone or beside others, evicted or not."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from backend.api import Result, SamplingConfig
from tests.fakes.beam_oracle import beam_search
from tests.model.tiers import TierCase
from tests.parity.scenario import RecordingEngine
from tests.parity.test_engine_parity import FAMILIES

pytestmark = pytest.mark.feature("000-32")
EARLY = {1: True, 0: False, 2: "never"}
PROMPTS = ([5, 17, 3, 99, 42, 8, 120], [7, 3], [1, 2, 3] * 15)


LARGE = ["qwen3"]  # the search knows nothing of families: one more will do


@pytest.fixture(
    scope="module",
    params=["llama3", *(pytest.param(name, marks=pytest.mark.slow("parity's large combinations")) for name in LARGE)],
)
def hf(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = FAMILIES[request.param]().eval()
    model.config.architectures = [type(model).__name__]
    model.generation_config.eos_token_id = None  # the tests choose their own
    return model


class Beams(RecordingEngine):
    """Takes the results of beams, and no logits."""

    results: dict[int, Result]

    def search(
        self, prompts: list[list[int]], max_tokens: int, evict_every: int | None, **fields: object
    ) -> list[Result]:
        found: dict[int, Result] = {}
        first = self._next_id
        for prompt in prompts:
            self.start(prompt, max_tokens, **fields)
        for step in range(1000):
            if not self.core.has_work:
                break
            if evict_every and step % evict_every == evict_every - 1:
                self.evict_everybody()
            for response in self.core.step():
                found[response.request_id] = response.result
            self.core.check_integrity()
        return [found[first + index] for index in range(len(prompts))]

    def _record(self, slot: int, logits: torch.Tensor) -> None:
        pass


def of_transformers(
    hf: PreTrainedModel,
    prompt: list[int],
    max_tokens: int,
    width: int,
    end_ids: tuple[int, ...],
    penalty: float,
    early: int,
) -> tuple[list[list[int]], list[float]]:
    """(outputs, scores), the best first."""
    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        length_penalty=penalty,
        early_stopping=EARLY[early],
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    done = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config)
    lengths = (done.beam_indices >= 0).sum(1).tolist()
    outputs = [ids[len(prompt) :][:length] for ids, length in zip(done.sequences.tolist(), lengths, strict=True)]
    return outputs, done.sequences_scores.tolist()


def end_ids_of(hf: PreTrainedModel, prompt: list[int], width: int) -> tuple[int, ...]:
    """Tokens that a search meets on its way, so that hypotheses end in the middle of it."""
    outputs, _ = of_transformers(hf, prompt, 12, width, (), 1.0, 0)
    return outputs[0][4], outputs[-1][7]


@pytest.mark.parametrize("evict_every", [None, 11])  # what is evicted comes back in a few steps, once for each row
@pytest.mark.parametrize(
    ("width", "penalty", "early"), [(4, 1.0, 0), (4, 1.0, 1), (3, -0.5, 2), (3, 1.5, 2), (2, 0.0, 1)]
)
def test_tokens_and_scores_are_those_of_transformers(
    hf: PreTrainedModel, tier: TierCase, width: int, penalty: float, early: int, evict_every: int | None
) -> None:
    engine = Beams.of_transformers(hf, tier, 64)
    config = SamplingConfig(beam_width=width, length_penalty=penalty, early_stopping=early)
    for ends in (False, True):
        end_ids = end_ids_of(hf, PROMPTS[0], width) if ends else ()
        results = engine.search(list(PROMPTS), 20, evict_every, sampling_config=config, end_ids=end_ids)
        for prompt, result in zip(PROMPTS, results, strict=True):
            outputs, scores = of_transformers(hf, prompt, 20, width, end_ids, penalty, early)
            assert result.output_token_ids == outputs
            measured = [
                total / len(output) ** penalty for total, output in zip(result.cum_log_probs, outputs, strict=True)
            ]
            assert measured == pytest.approx(scores, abs=2e-4)


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_the_plain_search_of_the_simulation_is_that_of_transformers(
    hf: PreTrainedModel, penalty: float, early: int
) -> None:
    """So what the simulation shows of beams under pressure holds for this search."""

    @torch.inference_mode()
    def top(ids: list[int], count: int) -> list[tuple[int, float]]:
        values, tokens = hf(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1).topk(count)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))

    prompt = list(PROMPTS[0])
    end_ids = end_ids_of(hf, prompt, 3)
    found = beam_search(prompt, 12, 3, top, end_ids, length_penalty=penalty, early_stopping=early)
    outputs, scores = of_transformers(hf, prompt, 12, 3, end_ids, penalty, early)
    assert [beam.tokens for beam in found] == outputs
    assert [beam.score for beam in found] == pytest.approx(scores, abs=2e-4)


@pytest.mark.feature("000-29", "002-52")
@pytest.mark.parametrize("evict_every", [None, 11])  # what is evicted comes back in a few steps, once for each row
def test_sampled_sequences_are_the_same_alone_in_a_batch_and_evicted(
    hf: PreTrainedModel, tier: TierCase, evict_every: int | None
) -> None:
    config = SamplingConfig(num_return_sequences=4, temperature=1.0, seed=11)

    def sampled(prompts: list[list[int]], evict: int | None) -> dict[int, list[int]]:
        engine = Beams.of_transformers(hf, tier, 64)
        by_index: dict[int, list[int]] = {}
        for prompt in prompts:
            engine.start(prompt, 24, sampling_config=config)
        for step in range(1000):
            if not engine.core.has_work:
                break
            if evict and step % evict == evict - 1:
                engine.evict_everybody()
            for response in engine.core.step():
                if response.request_id == len(prompts):
                    by_index[response.result.sequence_index] = response.result.output_token_ids[0]
            engine.core.check_integrity()
        return by_index

    alone = sampled([PROMPTS[2]], None)
    assert len({tuple(tokens) for tokens in alone.values()}) == 4
    assert sampled([*PROMPTS], evict_every) == alone


def test_greedy_sequences_are_equal(hf: PreTrainedModel, tier: TierCase) -> None:
    engine = Beams.of_transformers(hf, tier, 64)
    engine.start(PROMPTS[0], 12, sampling_config=SamplingConfig(num_return_sequences=3))
    told = [response.result for _ in range(40) if engine.core.has_work for response in engine.core.step()]
    assert [result.sequence_index for result in told] == [0, 1, 2]
    assert len({tuple(result.output_token_ids[0]) for result in told}) == 1
