"""LoRARequest from end to end: what an adapter generates is what PEFT's merged weights generate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from compat.llm import LLM, LoRARequest, RequestError, SamplingParams
from tests.model.adapters import make_adapter

PROMPT = list(range(5, 20))
FEW = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model_dir, root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def expected(model_dir: Path, adapters: list[Path]) -> list[list[int]]:
    """Greedy tokens of the weights W + scale B A of each adapter, and last those of the model itself."""
    found = [_greedy(model_dir, path) for path in (*adapters, None)]
    assert len({tuple(tokens) for tokens in found}) == 3
    return found


@torch.inference_mode()
def _greedy(base: Path, adapter: Path | None) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    tokens = list(PROMPT)
    for _ in range(FEW.max_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def adapted(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, dtype="float32", enable_lora=True, lora_config=SimpleNamespace(max_lora_rank=8)) as llm:
        yield llm


@pytest.mark.feature("002-45", "002-05")
def test_an_adapter_generates_what_its_merged_weights_do(
    adapted: LLM, adapters: list[Path], expected: list[list[int]]
) -> None:
    """Of three prompts in one batch each has its own adapter, or none; a single one may be given for all."""
    first, second = (LoRARequest(f"a{i}", i + 1, str(path)) for i, path in enumerate(adapters))
    each = adapted.generate([PROMPT] * 3, FEW, lora_request=[first, second, None])
    assert [output.outputs[0].token_ids for output in each] == expected
    by_id = adapted.generate([PROMPT] * 2, FEW, lora_request=LoRARequest("a1", 2))
    assert [output.outputs[0].token_ids for output in by_id] == [expected[1]] * 2


@pytest.mark.feature("002-45", "002-05")
def test_an_adapter_streams(adapted: LLM, adapters: list[Path], expected: list[list[int]]) -> None:
    async def stream() -> list[int]:
        lora = LoRARequest(lora_name="mine", lora_int_id=7, lora_path=str(adapters[0]))
        tokens: list[int] = []
        async for output in adapted.generate_async(PROMPT, FEW, lora_request=lora, streaming=True):
            tokens = output.outputs[0].token_ids
        return tokens

    assert asyncio.run(stream()) == expected[0]


@pytest.mark.feature("002-45")
def test_what_is_not_there_or_too_large_is_an_error_of_its_request(
    adapted: LLM, model_dir: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with pytest.raises(RequestError, match="LoRA task 99 not found in cache"):
        adapted.generate(PROMPT, FEW, lora_request=LoRARequest("unknown", 99))
    with pytest.raises(RequestError, match="LoRA adapter 'none': none: adapter_config.json: File does not exist; put"):
        adapted.generate(PROMPT, FEW, lora_request=LoRARequest("none", 3, str(tmp_path / "none")))
    wide = make_adapter(model_dir, tmp_path / "wide", 1, rank=9, target_modules=["o_proj"])
    with pytest.raises(RequestError, match=r"has rank 9 in layer 0, o_proj, the limit is 8 \(lora.max_rank\)"):
        adapted.generate(PROMPT, FEW, lora_request=LoRARequest("wide", 4, str(wide)))
    assert adapted.generate(PROMPT, FEW).outputs[0].token_ids == expected[2], "and the engine goes on"
