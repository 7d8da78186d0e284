"""Encoders: every family agrees with transformers' own forward pass, and a text's bits never depend on the texts beside it."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from backend.api import ConfigError, OutputConfig, Request, SamplingConfig, SessionConfig
from backend.api.checkpoint.adapter_files import projection_of
from backend.api.lora import LoraConfig
from backend.architectures.checkpoint import examine
from backend.architectures.hosted import ENCODERS
from backend.executor import Executor
from tests.executor.helpers import drain
from tests.hosted.encoders import hidden_states, save_encoder, tiny_encoder
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.test_lora import config
from tests.model.tiers import NATIVE, TORCH, TierCase
from tests.native.harness import prompt

ALL = OutputConfig(prompt_hidden_states="all")
PLAIN = [name for name in ENCODERS if not name.endswith("ForMaskedLM")]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
}


def _text(length: int) -> list[int]:
    return [3 + token for token in prompt(length, 157, seed=length)]


TEXTS = [_text(length) for length in (45, 1, 17, 30, 45, 2, 33)]
Made = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def make(architecture: str) -> tuple[Path, PreTrainedModel]:
        model = tiny_encoder(architecture)
        return save_encoder(model, tmp_path_factory.mktemp(architecture)), model

    return make


def engine(directory: Path, tier: TierCase, scheduler: dict[str, Any] | None = None, **model: Any) -> Engine:
    """`model`: fields of the section."""
    config = engine_config(directory, tier, scheduler=scheduler or {"max_num_tokens": 100, "max_batch_size": 8})
    return Engine(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **model)))


def embed(engine: Engine, texts: list[list[int]], output: OutputConfig = ALL) -> list[Tensor]:
    """Hidden states of texts that are sent together."""
    asked = [engine.ask(text, 0, output) for text in texts]
    engine.run()
    return [tensor_of(engine.responses[number][-1].result.prompt_hidden_states) for number in asked]


@pytest.mark.parametrize("architecture", ENCODERS)
def test_hidden_states_are_those_of_transformers(encoder: Made, kernels: CDLL, architecture: str) -> None:
    directory, model = encoder(architecture)
    for tier in (NATIVE,) if architecture.endswith("ForMaskedLM") else (NATIVE, TORCH):
        for measured, expected in zip(embed(engine(directory, tier), TEXTS), hidden_states(model, TEXTS), strict=True):
            assert (measured - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("form", ["float32", "bfloat16", "w8a8"])
@pytest.mark.parametrize("architecture", PLAIN)
def test_a_text_has_the_same_bits_alone_and_beside_others(
    encoder: Made, kernels: CDLL, architecture: str, form: str
) -> None:
    served = engine(encoder(architecture)[0], NATIVE, **FORMS[form])
    together = embed(served, TEXTS)
    for text, expected in zip(TEXTS, together, strict=True):
        (alone,) = embed(served, [text])
        assert torch.equal(alone, expected)


def test_a_long_text_runs_in_one_pass(tmp_path: Path, kernels: CDLL) -> None:
    """A decoder computes hidden states of at most 256 tokens of a prompt in one pass."""
    model = tiny_encoder("BertModel", max_position_embeddings=512)
    texts = [_text(500), _text(300), _text(7)]
    served = engine(save_encoder(model, tmp_path), NATIVE, scheduler={"max_num_tokens": 512})
    for measured, expected in zip(embed(served, texts), hidden_states(model, texts), strict=True):
        assert (measured - expected).abs().max() <= 1e-5


def test_a_text_that_another_one_begins_with_is_computed_anew(encoder: Made, kernels: CDLL) -> None:
    directory, model = encoder("RobertaModel")
    served, long = engine(directory, NATIVE), _text(90)
    texts = [long, long[:64], [*long[:64], 5], long]
    for text, states in zip(texts, hidden_states(model, texts), strict=True):
        (last,) = embed(served, [text], OutputConfig(prompt_hidden_states="last"))
        assert (last - states[-1:]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("length", "fields", "sentence"),
    [
        (9, {"max_tokens": 1}, "this checkpoint has no output head and generates nothing; ask for embeddings"),
        (9, {"output": OutputConfig(prompt_logits_of=(3,))}, "this checkpoint has no output head"),
        (101, {}, "the prompt has 101 tokens, the limit is 100 (scheduler.max_num_tokens, for the model reads a text whole, in "
         "one step); shorten it"),
        (256, {}, "the prompt has 256 tokens, the limit is 255 (the model's own, or model.max_seq_len); shorten it"),
        (9, {"session": SessionConfig(7, start=True)}, "this model reads a text as a whole and has no sessions"),
        (9, {"sampling_config": SamplingConfig(num_return_sequences=2)}, "this model gives one result for a text"),
        (9, {"output": OutputConfig(), "sampling_config": SamplingConfig(beam_width=2)}, "this model gives one result"),
    ],
)  # fmt: skip
def test_what_an_encoder_does_not_do_is_one_sentence(
    encoder: Made, kernels: CDLL, length: int, fields: dict[str, Any], sentence: str
) -> None:
    served = engine(encoder("RobertaModel")[0], NATIVE)
    fields = {"max_tokens": 0, "output": ALL, **fields}
    (error,) = served.responses[served.ask(_text(length), **fields)]
    assert sentence in error.error_msg and "\n" not in error.error_msg


def test_a_decoder_in_an_encoders_place_is_refused(tmp_path: Path) -> None:
    model = tiny_encoder("BertModel", is_decoder=True)
    with pytest.raises(ConfigError, match="a mask that is neither that of whole texts nor a window"):
        engine(save_encoder(model, tmp_path), TORCH)


@pytest.mark.parametrize("architecture", PLAIN)
def test_the_limit_of_a_text_is_known_before_anything_is_loaded(
    encoder: Made, kernels: CDLL, architecture: str
) -> None:
    directory, _ = encoder(architecture)
    assert examine(directory).max_position == engine(directory, TORCH).core.model.max_seq_len


@pytest.mark.parametrize("architecture", ["BertModel", "AlbertModel"])
def test_a_text_with_an_adapter_is_what_peft_makes_of_it(
    encoder: Made, tier: TierCase, architecture: str, tmp_path: Path
) -> None:
    """ALBERT runs the same linear layers in each of its layers, and so with the same adapter."""
    directory, _ = encoder(architecture)
    model = tiny_encoder(architecture)
    names = ["query", "key", "value", "dense", "ffn", "ffn_output"]
    targets = [name for name, _ in model.named_modules() if projection_of(name) and name.split(".")[-1] in names]
    peft_model = get_peft_model(model, PeftConfig(r=4, target_modules=targets)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.4 * torch.randn_like(weight) / weight.shape[1] ** 0.5)
        expected = peft_model(input_ids=torch.tensor([TEXTS[0]])).last_hidden_state[0]
        plain = encoder(architecture)[1](input_ids=torch.tensor([TEXTS[0]])).last_hidden_state[0]
    peft_model.save_pretrained(tmp_path)
    with Executor.from_directory(directory, config(tier)) as executor:
        loras = (LoraConfig(1, path=str(tmp_path)), None)
        ids = executor.enqueue_requests([Request(TEXTS[0], 0, output_config=ALL, lora=lora) for lora in loras])
        responses = drain(executor, ids)
    found = [responses[number][-1].result.prompt_hidden_states for number in ids]
    for states, wanted in zip(found, (expected, plain), strict=True):
        assert (tensor_of(states) - wanted).abs().max() <= 1e-5
