"""A GGUF file where a model's directory goes: Executor, LLM, quantize, --model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from backend.api import ConfigError, EngineConfig, OutputConfig, Request
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor
from backend.models.loader import load_directory
from backend.quant.run import QuantSettings, quantize_checkpoint
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer
from benchmarks.quality.perplexity import row_logits
from compat.llm import LLM, SamplingParams
from deploy import model_source
from deploy.cli import app
from deploy.errors import UserError
from deploy.serve import ServeOptions
from tests.executor.helpers import drain, tokens_of
from tests.model.gguf_files import as_checkpoint, write_gguf
from tests.model.tiers import TierCase
from tests.text.gguf_tokenizers import add_tokenizer
from tests.text.tokenizers_made import TEMPLATE, llama3_bpe, write_directory
from tools.make_random_model import LLAMA3_ROPE, make_random_model

SIZES: dict[str, Any] = dict(
    hidden_size=128, num_attention_heads=4, head_dim=32, intermediate_size=256, num_hidden_layers=2
)
PROMPTS = ([5, 6, 7, 8], list(range(20, 60)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of the family of Llama 3, with its tokenizer and a chat template."""
    backend, config = llama3_bpe()
    directory = tmp_path_factory.mktemp("served")
    eos = backend.token_to_id(config["eos_token"])
    vocab_size = backend.get_vocab_size()
    make_random_model(directory, "llama3", seed=4, vocab_size=vocab_size, eos_token_id=eos, **SIZES)
    return write_directory(directory, backend, config | {"chat_template": TEMPLATE})


def converted(model_dir: Path, file: Path, kind: str = "F32") -> Path:
    backend, config = llama3_bpe()
    config |= {"chat_template": TEMPLATE}
    return write_gguf(model_dir, file, kind, lambda writer: add_tokenizer(writer, backend, config, pre="llama-bpe"))


@pytest.fixture(scope="module")
def file(model_dir: Path) -> Path:
    """Beside nothing else, so that its directory stands for it."""
    (model_dir.parent / "alone").mkdir(exist_ok=True)
    return converted(model_dir, model_dir.parent / "alone" / "Tiny-F32.gguf")


def greedy(path: Path, tier: TierCase) -> list[list[int]]:
    config = EngineConfig(
        ModelConfigSection(dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1),
        KvCacheConfig(block_size=tier.block, max_tokens=512),
        SchedulerConfig(max_batch_size=2, max_num_tokens=64),
    )
    output = OutputConfig(exclude_input_from_output=True)
    with Executor.from_directory(path, config) as executor:
        ids = executor.enqueue_requests([Request(list(prompt), 12, output_config=output) for prompt in PROMPTS])
        got = drain(executor, ids)
        return [tokens_of(got[request_id]) for request_id in ids]


def test_an_executor_over_a_file_gives_the_tokens_of_the_checkpoint(
    model_dir: Path, file: Path, tier: TierCase
) -> None:
    assert greedy(file, tier) == greedy(file.parent, tier) == greedy(model_dir, tier)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0"])
def test_blocks_on_every_tier_give_the_tokens_of_their_values(tmp_path: Path, tier: TierCase, kind: str) -> None:
    """With an output head of blocks too. The native kernels round the scales to bfloat16, so the tokens of a few steps are
    compared, not the logits.
    """
    untied = make_random_model(tmp_path / "untied", "llama", seed=4, vocab_size=300, **SIZES)
    blocks = write_gguf(untied, tmp_path / "model.gguf", kind)
    measured = greedy(blocks, tier)
    expected = greedy(as_checkpoint(blocks, untied, tmp_path / "floats"), tier)
    assert [ids[:2] for ids in measured] == [ids[:2] for ids in expected]


def test_an_llm_reads_the_tokenizer_of_the_file_and_saves_it(model_dir: Path, file: Path, tmp_path: Path) -> None:
    """The saved one is read by an engine process of its own."""
    few = SamplingParams(max_tokens=6, ignore_eos=True)
    one_thread = EngineConfig(ModelConfigSection(num_threads=1))
    with LLM(model_dir, engine_config=one_thread) as llm:
        expected = llm.generate("The quick brown", few)
    with LLM(file, engine_config=one_thread) as llm:
        measured = llm.generate("The quick brown", few)
        llm.save(tmp_path / "saved")
    assert (measured.outputs, measured.prompt_token_ids) == (expected.outputs, expected.prompt_token_ids)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [file.name]
    with LLM(tmp_path / "saved", orchestrator_type="rpc", engine_config=one_thread) as llm:
        assert llm.generate("The quick brown", few).outputs == expected.outputs


def test_quantize_writes_a_checkpoint_with_the_tokenizer_of_the_file(
    model_dir: Path, file: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(file, tmp_path / "made", QuantSettings("w8a8"), None)
    quantize_checkpoint(model_dir, tmp_path / "expected", QuantSettings("w8a8"), None)
    measured, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "expected"))
    assert measured.keys() == expected.keys()
    assert all(torch.equal(measured[name], expected[name]) for name in expected)
    rows = torch.arange(40)[None]
    logits = [
        row_logits(load_directory(tmp_path / name, None, "float32", torch.device("cpu")), rows)
        for name in ("made", "expected")
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    tokenizers = [Tokenizer.from_directory(path) for path in (tmp_path / "made", model_dir)]
    for text in ("Hello world", "<|eot_id|> x 1234"):
        assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    assert tokenizers[0].special_tokens == tokenizers[1].special_tokens
    message = [{"role": "user", "content": "hi"}]
    assert ChatTemplate.from_directory(tmp_path / "made", tokenizers[0]).render(message) == "user: hi\n"


def test_a_quantised_file_is_not_quantised_again(model_dir: Path, tmp_path: Path) -> None:
    blocks = converted(model_dir, tmp_path / "model.gguf", "Q4_1")
    with pytest.raises(ConfigError, match="model.gguf is quantised already"):
        quantize_checkpoint(blocks, tmp_path / "made", QuantSettings("w8a8"), None)


def test_the_rope_factors_of_a_file_are_those_of_the_scaling_they_were_made_of(file: Path, model_dir: Path) -> None:
    """So that the comparisons above are of a model that has some: 32 / 2 of them, from 1 to the scaling's factor."""
    factors = load_directory(file, None, "float32", torch.device("cpu")).config.ropes[0].factors
    assert len(factors) == 16 and factors[0] == 1 and factors[-1] == LLAMA3_ROPE["factor"]


@pytest.mark.parametrize("as_directory", [False, True])
def test_the_launcher_takes_the_file_or_its_directory(
    file: Path, as_directory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent.parent)
    name = "alone" if as_directory else f"alone/{file.name}"
    assert model_source.resolve_model(name) == file


def test_clients_may_call_it_by_the_name_of_the_file(file: Path) -> None:
    assert ServeOptions(model=str(file)).served_names == ("Tiny", "everbatch", "Tiny-F32", str(file))


def test_a_spoiled_file_ends_in_one_sentence_before_a_server_is_started(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"^--model .*a.gguf: a.gguf is no GGUF file, or is cut short"):
        model_source.resolve_model(str(tmp_path / "a.gguf"))


def test_help_names_the_file() -> None:
    said = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "GGUF file" in " ".join(said.replace("│", " ").split())


def test_the_settings_of_the_made_checkpoint_are_those_of_the_original(
    model_dir: Path, file: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(file, tmp_path / "made", QuantSettings("w8a8"), None)
    made, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "made", model_dir))
    for key in ("architectures", "hidden_size", "head_dim", "vocab_size", "tie_word_embeddings", "dtype"):
        assert made[key] == original[key]
