"""Prompt tuning and positions of a Request: what the core's prompt inputs give, through the bindings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compat import trtllm
from tests.trtllm.helpers import finish, refused, run

NEW = 5
NEW_ONLY = trtllm.OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)


def ids_of(executor: trtllm.Executor, prompt: list[int], **fields: Any) -> list[int]:
    return run(executor, prompt, NEW, output_config=NEW_ONLY, **fields).output_token_ids[0]


@torch.inference_mode()
def greedy(model_path: Path, vectors: torch.Tensor, **fields: Any) -> list[int]:
    """Tokens behind embeddings [tokens, hidden], by plain forward passes."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    ids: list[int] = []
    for n in range(NEW):
        of_step = {name: value(n) for name, value in fields.items()}
        ids.append(int(model(inputs_embeds=vectors[None], **of_step).logits[0, -1].argmax()))
        vectors = torch.cat([vectors, model.get_input_embeddings().weight[ids[-1:]]])
    return ids


@pytest.mark.feature("000-18")
def test_virtual_ids_stand_for_rows_of_the_table(executor: trtllm.Executor, model_path: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(model_path).get_input_embeddings().weight.detach().float()
    vocab_size, width = weights.shape
    table = torch.randn(2, width, generator=torch.Generator().manual_seed(3))
    prompt = [vocab_size + 1, 3, vocab_size, 4]
    expected = greedy(model_path, torch.stack([table[1], weights[3], table[0], weights[4]]))
    for given in (table, table[None], table.double()):
        assert ids_of(executor, prompt, prompt_tuning_config=trtllm.PromptTuningConfig(given)) == expected
    assert "is outside the vocabulary" in refused(executor, prompt, NEW)
    wrong = trtllm.PromptTuningConfig(torch.zeros(2, width + 1))
    assert f"expected is float32 [1 or more, {width}]" in refused(executor, prompt, NEW, prompt_tuning_config=wrong)


@pytest.mark.feature("000-18")
def test_extra_ids_and_tables_keep_cached_prefixes_apart(executor: trtllm.Executor) -> None:
    """A prompt of 70 tokens has two whole blocks of 32, which the next request finds if it may share them."""
    width = executor._model.prompt_embedding_width
    prompt = [executor._model.vocab_size] * 4 + [5] * 66

    def num_found(value: float, extra_ids: list[int] | None) -> int:
        tuned = trtllm.PromptTuningConfig(torch.full((1, width), value), extra_ids)
        request = trtllm.Request(prompt, 1, output_config=NEW_ONLY, prompt_tuning_config=tuned, cache_salt_id=1)
        metrics = finish(executor, executor.enqueue_request(request))[0].result.request_perf_metrics
        return metrics.kv_cache_metrics.num_reused_blocks

    ones, twos = [1] * 4 + [0] * 66, [2] * 4 + [0] * 66
    assert [num_found(0.5, None), num_found(0.25, None), num_found(0.5, ones), num_found(0.5, twos)] == [0] * 4
    assert num_found(0.5, ones) > 0 and num_found(0.25, None) > 0
    with_three = trtllm.PromptTuningConfig(torch.zeros(1, width), [1, 2, 3])
    assert "there are 3 extra_ids for 70 input tokens" in refused(executor, prompt, 1, prompt_tuning_config=with_three)


def test_positions_take_the_place_of_the_tokens_own(executor: trtllm.Executor, model_path: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(model_path).get_input_embeddings().weight.detach().float()
    prompt, places = [3, 4, 5, 6], [0, 7, 9, 20]
    expected = greedy(
        model_path, weights[prompt], position_ids=lambda n: torch.tensor([places + [21 + i for i in range(n)]])
    )
    assert ids_of(executor, prompt, position_ids=places) == expected != ids_of(executor, prompt)
    assert "there are 2 position_ids for 4 input tokens" in refused(executor, prompt, 1, position_ids=[0, 1])
