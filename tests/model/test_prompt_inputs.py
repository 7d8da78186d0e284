"""Prompts that bring embeddings for ids beyond the vocabulary, or positions of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.api import OutputConfig, SamplingConfig, SessionConfig, TensorData
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import TORCH, TierCase

BOTH = OutputConfig(return_context_logits=True, return_generation_logits=True)
LENGTH, NEW = 23, 5
Checkpoint = Callable[[str], Path]


def table(rows: int, width: int, seed: int = 0) -> TensorData:
    values = np.random.default_rng(seed).normal(0, 0.5, (rows, width)).astype(np.float32)
    return TensorData("float32", (rows, width), values.tobytes())


def virtual_prompt(vocab: int) -> list[int]:
    """Rows 0, 1, 2 of the table at the head, row 1 again in the middle."""
    return [vocab, vocab + 1, vocab + 2, *((7 * i) % 120 for i in range(10)), vocab + 1, *range(30, 30 + LENGTH - 14)]


@torch.inference_mode()
def plain_forward(oracle: Oracle, tokens: list[int], given: TensorData) -> Tensor:
    """Logits [tokens, vocab] of a forward pass over embeddings that were put together by hand."""
    weights = oracle.model.get_input_embeddings().weight
    vectors = [weights[t] if t < len(weights) else tensor_of(given)[t - len(weights)] for t in tokens]
    return oracle.model(inputs_embeds=torch.stack(vectors)[None]).logits[0]


@pytest.mark.feature("000-18")
@pytest.mark.parametrize("evict", [False, True])
def test_embeddings_equal_a_forward_over_concatenated_ones(
    family: tuple[Path, Oracle], evict: bool, tier: TierCase
) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, tier, scheduler={"max_chunk_tokens": 9}))
    model = engine.core.model
    given, prompt = table(3, model.prompt_embedding_width), virtual_prompt(model.vocab_size)
    request_id = engine.ask(prompt, NEW, BOTH, prompt_embeddings=given)
    engine.ask([1, 2, 3], 9, OutputConfig())
    engine.run(evict)
    result = engine.responses[request_id][-1].result
    tokens = result.output_token_ids[0]
    assert tokens[:LENGTH] == prompt and all(token < model.vocab_size for token in tokens[LENGTH:])
    expected = plain_forward(oracle, tokens, given)
    torch.testing.assert_close(tensor_of(result.context_logits), expected[:LENGTH], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tensor_of(result.generation_logits)[0], expected[LENGTH - 1 : -1], atol=1e-4, rtol=1e-4)


@pytest.mark.feature("000-18")
def test_tables_that_differ_never_share_kv_and_equal_ones_do(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH))
    model = engine.core.model
    prompt = virtual_prompt(model.vocab_size)

    def ask(seed: int) -> tuple[int, list[int]]:
        given = table(3, model.prompt_embedding_width, seed)
        result = engine.answer(prompt, NEW, BOTH, prompt_embeddings=given).result
        return result.context_logits.shape[0], result.output_token_ids[0]

    first, other, again = ask(1), ask(2), ask(1)
    assert (first[0], other[0]) == (LENGTH, LENGTH)
    assert again[0] < LENGTH and again[1] == first[1]


@pytest.mark.feature("000-18")
@pytest.mark.parametrize("shift", [0, 40])
def test_position_ids_take_the_place_of_the_tokens_own(family: tuple[Path, Oracle], shift: int, tier: TierCase) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, tier, scheduler={"max_chunk_tokens": 3}))
    prompt = [(7 * i) % 120 for i in range(8)]
    given = [shift + (2 * i if i < 5 else i + 4) for i in range(8)]  # with gaps
    result = engine.answer(prompt, NEW, BOTH, position_ids=given).result
    tokens = result.output_token_ids[0]
    places = torch.tensor([[*given, *range(given[-1] + 1, given[-1] + NEW + 1)]])
    with torch.inference_mode():
        mask = torch.ones(1, 1, len(tokens), len(tokens)).tril().log()  # causal, whatever the positions say
        expected = oracle.model(torch.tensor([tokens]), position_ids=places, attention_mask=mask).logits[0]
    torch.testing.assert_close(tensor_of(result.context_logits), expected[:8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tensor_of(result.generation_logits)[0], expected[7:-1], atol=1e-4, rtol=1e-4)


def test_the_slot_of_a_prompt_with_inputs_goes_to_one_without(checkpoint: Checkpoint, tier: TierCase) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False))
    plain = engine.answer([5, 6, 7], 4, OutputConfig()).result.output_token_ids
    engine.answer([5, 6, 7], 4, OutputConfig(), position_ids=[9, 30, 31])
    assert engine.answer([5, 6, 7], 4, OutputConfig()).result.output_token_ids == plain


WIDTH = 48
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(prompt_embeddings=table(3, 7)), r"prompt_embeddings are float32 \[3, 7\], expected is float32 \[1 or more, "),
    (dict(prompt_embeddings=TensorData("int8", (1, WIDTH), b"")), "prompt_embeddings are int8"),
    (
        dict(prompt_embeddings=TensorData("float32", (1, WIDTH), b"1234")),
        "prompt_embeddings have 4 bytes, 192 are needed",
    ),
    (dict(prompt_embeddings=table(1, WIDTH)), "input token 132 is outside the vocabulary; allowed is 0 to 131"),
    (dict(position_ids=[1]), "there are 1 position_ids for 2 input tokens; give one for each"),
    (dict(position_ids=[0, -1]), "run from -1 to 1, allowed is 0 to"),
    (dict(position_ids=[0, 10**6]), "allowed is 0 to"),
    (
        dict(prompt_embeddings=table(2, WIDTH), sampling_config=SamplingConfig(no_repeat_ngram_size=2)),
        "do not go with penalties or no_repeat_ngram_size",
    ),
    (dict(prompt_embeddings=table(2, WIDTH), session=SessionConfig(1, start=True)), "a session takes tokens only"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_cannot_be_taken_is_refused(checkpoint: Checkpoint, fields: dict[str, Any], message: str) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH))
    assert (engine.core.model.vocab_size, engine.core.model.prompt_embedding_width) == (131, WIDTH)
    prompt = [5, 6] if "position_ids" in fields else [5, 132]
    error = engine.answer(prompt, 3, OutputConfig(), **fields)

    assert re.search(message, error.error_msg), error.error_msg


def test_rows_with_inputs_of_their_own_leave_those_beside_them_as_they_are(
    checkpoint: Checkpoint, tier: TierCase
) -> None:
    """Four kinds of rows in one batch, each with the tokens that it has alone."""
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False))
    model = engine.core.model
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 6, 7], {}),
        ([5, model.vocab_size, 7], dict(prompt_embeddings=table(1, model.prompt_embedding_width))),
        ([5, 6, 7], dict(position_ids=[3, 9, 20])),
        ([model.vocab_size + 1, 6], dict(prompt_embeddings=table(2, WIDTH, 5), position_ids=[4, 4])),
    ]
    alone = [engine.answer(prompt, 9, BOTH, **fields).result.output_token_ids for prompt, fields in kinds]
    ids = [engine.ask(prompt, 9, BOTH, **fields) for prompt, fields in kinds]
    engine.run()
    assert [engine.responses[each][-1].result.output_token_ids for each in ids] == alone
    assert len({tuple(tokens[0][3:]) for tokens in alone}) == 4


def test_beams_are_of_the_prompt_with_its_embeddings(family: tuple[Path, Oracle], tier: TierCase) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, tier))
    model = engine.core.model
    given, prompt = table(3, model.prompt_embedding_width), virtual_prompt(model.vocab_size)
    sampling = SamplingConfig(beam_width=3)
    result = engine.answer(prompt, 1, OutputConfig(), prompt_embeddings=given, sampling_config=sampling).result
    expected = plain_forward(oracle, prompt, given)[-1].log_softmax(-1).topk(3)
    assert [tokens[-1] for tokens in result.output_token_ids] == expected.indices.tolist()
    assert result.cum_log_probs == pytest.approx(expected.values.tolist(), abs=1e-3)
