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

from backend.api import ErrorCode, OutputConfig, SamplingConfig, SessionConfig, TensorData
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import NATIVE, TORCH

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
def test_embeddings_equal_a_forward_over_concatenated_ones(family: tuple[Path, Oracle], evict: bool) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, TORCH, scheduler={"max_chunk_tokens": 9}))
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


@pytest.mark.parametrize("shift", [0, 40])
def test_position_ids_take_the_place_of_the_tokens_own(family: tuple[Path, Oracle], shift: int) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, TORCH, scheduler={"max_chunk_tokens": 3}))
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


def test_the_slot_of_a_prompt_with_inputs_goes_to_one_without(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH, reuse=False))
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


def test_the_native_tier_refuses_them_by_name(checkpoint: Checkpoint, native_kernels: None) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), NATIVE))
    for fields in (dict(prompt_embeddings=table(2, WIDTH)), dict(position_ids=[0, 1])):
        error = engine.answer([5, 6], 2, OutputConfig(), **fields)
        assert error.error_code is ErrorCode.UNSUPPORTED
        (name,) = fields
        assert error.error_msg == (
            f"{name} are taken by the torch kernels only; leave them out, or serve with --set model.kernels=torch"
        )
