"""Prompts that bring embeddings, or positions, to models that transformers runs. Its `inputs_embeds` is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from backend.api import OutputConfig
from tests.hosted.tiny import save, tiny_model
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.test_prompt_inputs import BOTH, LENGTH, NEW, table, virtual_prompt
from tests.model.tiers import NATIVE, TierCase

# Experts; learnt positions and a factor on embeddings; a factor on whatever is embedded; a table narrower than the model.
SAMPLE = ("qwen3_moe", "biogpt", "granitemoe", "opt")
OWN = {"opt": {"word_embed_proj_dim": 48}}
Made = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def make(kind: str) -> tuple[Path, PreTrainedModel]:
        model = tiny_model(kind, **OWN.get(kind, {}))
        return save(model, tmp_path_factory.mktemp(kind)), model

    return make


def engine(directory: Path, tier: TierCase, **model: Any) -> Engine:
    """`model`: fields of the section."""
    model = {"implementation": "transformers"} | model
    config = engine_config(directory, tier, reuse=False, scheduler={"max_chunk_tokens": 9})
    return Engine(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **model)))


def ask(engine: Engine, evict: bool = False, beside: int = 1) -> tuple[list[int], Tensor]:
    """The tokens of a prompt with a table, and the logits of all of them, beside so many other requests."""
    model = engine.core.model
    prompt, given = virtual_prompt(model.vocab_size), table(3, model.prompt_embedding_width)
    number = engine.ask(prompt, NEW, BOTH, prompt_embeddings=given)
    for other in range(beside):
        engine.ask([1 + other, 2, 3], 9, OutputConfig())
    engine.run(evict)
    result = engine.responses[number][-1].result
    logits = torch.cat((tensor_of(result.context_logits), tensor_of(result.generation_logits)[0]))
    return result.output_token_ids[0], logits


@pytest.mark.feature("000-18")
@pytest.mark.parametrize("kind", SAMPLE)
def test_given_embeddings_are_those_of_inputs_embeds(made: Made, tier: TierCase, kind: str) -> None:
    directory, model = made(kind)
    served = engine(directory, tier)
    tokens, measured = ask(served)
    module, given = model.get_input_embeddings(), tensor_of(table(3, served.core.model.prompt_embedding_width))
    vocab = served.core.model.vocab_size
    with torch.inference_mode():
        vectors = [module(torch.tensor(t)) if t < vocab else given[t - vocab] for t in tokens]
        expected = model(inputs_embeds=torch.stack(vectors)[None], use_cache=False).logits[0, :-1]
    assert tokens[:LENGTH] == virtual_prompt(vocab)
    rows = torch.cat(
        (measured[:LENGTH], measured[LENGTH + 1 :])
    )  # the first generated token's logits are the prompt's last
    assert (rows.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= 1e-4
    assert torch.equal(measured[LENGTH - 1], measured[LENGTH])


@pytest.mark.feature("000-18")
@pytest.mark.parametrize("form", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "w8a8"}], ids=str)
def test_a_prompt_with_embeddings_has_the_same_bits_alone_beside_others_and_after_evictions(
    made: Made, native_kernels: None, form: dict[str, str]
) -> None:
    served = engine(made("qwen3_moe")[0], NATIVE, **form)
    tokens, alone = ask(served, beside=0)
    for evict in (False, True):
        again, beside = ask(served, evict, beside=3)
        assert again == tokens and torch.equal(beside, alone)


@pytest.mark.feature("000-18")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2"])
def test_positions_that_are_given_take_the_place_of_the_tokens_own(made: Made, tier: TierCase, kind: str) -> None:
    directory, model = made(kind)
    prompt, given = [(7 * i) % 120 for i in range(8)], [40, 42, 44, 46, 48, 49, 50, 51]
    result = engine(directory, tier).answer(prompt, NEW, BOTH, position_ids=given).result
    tokens = result.output_token_ids[0]
    places = torch.tensor([[*given, *range(52, 52 + NEW)]])
    with torch.inference_mode():
        mask = torch.ones(1, 1, len(tokens), len(tokens)).tril().log()  # causal, whatever the positions say
        expected = model(torch.tensor([tokens]), position_ids=places, attention_mask=mask, use_cache=False).logits[0]
    measured = torch.cat((tensor_of(result.context_logits), tensor_of(result.generation_logits)[0, 1:]))
    assert (measured.log_softmax(-1) - expected[:-1].log_softmax(-1)).abs().max() <= 1e-4
