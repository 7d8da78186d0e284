"""PromptAdapterRequest from end to end: what is generated is what PEFT generates with the same prompt tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backend.executor.prompt_adapters import MAX_HELD, PromptAdapters
from compat.llm import LLM, ParameterError, PromptAdapterRequest, RequestError, SamplingParams

PROMPT = list(range(5, 20))
FEW = SamplingParams(max_tokens=10, ignore_eos=True)


def make(base: Path, directory: Path, seed: int, num_tokens: int = 6) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_tokens))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "prompt_encoder" in name:
                weight.copy_(torch.randn_like(weight))
    tuned.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("soft")
    return [make(model_dir, root / str(seed), seed, 4 + seed) for seed in range(2)]


@torch.inference_mode()
def greedy(base: Path, adapter: Path | None) -> list[int]:
    """By transformers and PEFT, which put the virtual tokens in front."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    tokens = list(PROMPT)
    for _ in range(FEW.max_tokens or 0):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.feature("002-46", "002-07")
def test_a_prompt_adapter_generates_what_peft_does_beside_other_requests(
    llm: LLM, model_dir: Path, adapters: list[Path]
) -> None:
    expected = [greedy(model_dir, path) for path in (*adapters, None)]
    assert len({tuple(tokens) for tokens in expected}) == 3
    first, second = (PromptAdapterRequest(f"soft{n}", n + 1, str(path)) for n, path in enumerate(adapters))
    for _ in range(2):  # the second time prefixes are found in the cache: each those of its own rows
        found = llm.generate([PROMPT] * 3, FEW, prompt_adapter_request=[first, second, None])
        assert [each.outputs[0].token_ids for each in found] == expected
    assert found[0].prompt_token_ids == PROMPT


def test_what_cannot_be_is_refused_and_the_others_go_on(llm: LLM, adapters: list[Path]) -> None:
    soft = PromptAdapterRequest("soft", 1, str(adapters[0]))
    with pytest.raises(RequestError, match="prompt_embeddings do not go with penalties"):
        llm.generate(PROMPT, SamplingParams(max_tokens=2, repetition_penalty=1.5), prompt_adapter_request=soft)
    with pytest.raises(ParameterError, match="prompt adapter 'gone': .*File does not exist"):
        llm.generate(PROMPT, FEW, prompt_adapter_request=PromptAdapterRequest("gone", 2, "/no/such/directory"))
    with pytest.raises(TypeError, match="a PromptAdapterRequest is needed"):
        llm.generate(PROMPT, FEW, prompt_adapter_request="soft")
    assert len(llm.generate(PROMPT, FEW).outputs[0].token_ids) == 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_two_bytes_are_read(dtype: torch.dtype, adapters: list[Path], tmp_path: Path) -> None:
    rows = load_file(adapters[0] / "adapter_model.safetensors")["prompt_embeddings"].to(dtype)
    (tmp_path / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    save_file({"other": torch.ones(3), "prompt_embeddings": rows}, tmp_path / "adapter_model.safetensors")
    table = PromptAdapters().table(str(tmp_path))
    found = torch.frombuffer(bytearray(table.data), dtype=torch.float32).reshape(table.shape)
    assert torch.equal(found, rows.float())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is PREFIX_TUNING; a prompt adapter is PROMPT_TUNING"),
        ({"peft_type": "LORA"}, "peft_type is LORA; a prompt adapter is PROMPT_TUNING"),
        ({"num_transformer_submodules": 2}, "PROMPT_TUNING of a decoder"),
        (torch.ones(3), "prompt_embeddings has shape .3., .virtual tokens, hidden size. is needed"),
        (torch.ones(0, 4), "prompt_embeddings has shape"),
        (torch.ones(2, 4, dtype=torch.int64), "is I64, one of F32, F16, BF16 is needed"),
        (torch.full((2, 4), float("inf")), "holds a number that is not finite"),
        (torch.full((2, 4), float("nan")), "holds a number that is not finite"),
    ],
)
def test_a_hostile_adapter_is_refused(
    change: object, text: str, llm: LLM, adapters: list[Path], tmp_path: Path
) -> None:
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    config |= change if isinstance(change, dict) else {}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    rows = change if isinstance(change, torch.Tensor) else torch.ones(2, 4)
    save_file({"prompt_embeddings": rows}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ParameterError, match=text):
        llm.generate(PROMPT, FEW, prompt_adapter_request=PromptAdapterRequest("bad", 1, str(tmp_path)))


def test_an_adapter_of_another_width_ends_its_own_request(llm: LLM, adapters: list[Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    save_file({"prompt_embeddings": torch.ones(2, 5)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        RequestError, match=r"prompt_embeddings are float32 \[2, 5\], expected is float32 \[1 or more, 48\]"
    ):
        llm.generate(PROMPT, FEW, prompt_adapter_request=PromptAdapterRequest("wide", 1, str(tmp_path)))


def test_a_changed_adapter_is_read_again_and_few_are_held(adapters: list[Path], tmp_path: Path) -> None:
    config = (adapters[0] / "adapter_config.json").read_text()
    cache = PromptAdapters()
    for number in range(MAX_HELD + 3):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "adapter_config.json").write_text(config)
        save_file({"prompt_embeddings": torch.full((1, 4), float(number))}, directory / "adapter_model.safetensors")
        first = cache.table(str(directory))
        assert cache.table(str(directory)) is first
    assert len(cache._held) == MAX_HELD
    save_file({"prompt_embeddings": torch.zeros(3, 4)}, directory / "adapter_model.safetensors")
    assert cache.table(str(directory)).shape == (3, 4)
