"""LMDeploy's configuration classes: each field is honoured, without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import ConfigError
from backend.api.foreign import ForeignTable
from compat.config_object import ConfigObject
from compat.llm import NotHere, ParameterError
from compat.llm.arguments import PROGRAM
from compat.lmdeploy import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from compat.lmdeploy.sampling import engine_config, sampling_params
from compat.lmdeploy.tables import GENERATION, PYTORCH, TURBOMIND

TABLES: list[tuple[type[ConfigObject], ForeignTable]] = [
    (TurbomindEngineConfig, TURBOMIND),
    (PytorchEngineConfig, PYTORCH),
    (GenerationConfig, GENERATION),
]


@pytest.mark.parametrize(("cls", "table"), TABLES, ids=lambda each: getattr(each, "__name__", ""))
def test_every_field_is_in_the_table_and_its_default_is_taken(cls: type[ConfigObject], table: ForeignTable) -> None:
    assert {parameter.key for parameter in table} == set(cls.fields)
    whole = cls(**{name: value for name, value in cls().to_dict().items() if value is not None})
    _ = sampling_params(whole) if cls is GenerationConfig else engine_config(whole, {})


def test_without_fields_the_configuration_is_that_of_a_program() -> None:
    for given in (None, TurbomindEngineConfig(), PytorchEngineConfig()):
        assert engine_config(given, {}) == PROGRAM


def test_fields_reach_the_engine() -> None:
    made = engine_config(
        TurbomindEngineConfig(
            session_len=99, max_batch_size=3, cache_max_entry_count=0.4, quant_policy=8, cache_block_seq_len=64,
            enable_prefix_caching=False, max_prefill_token_num=77, dtype="float32", cache_chunk_size=3,
        ),
        {},
    )  # fmt: skip
    cache, scheduler = made.kv_cache, made.scheduler
    assert (made.model.max_seq_len, scheduler.max_batch_size, scheduler.max_num_tokens) == (99, 3, 77)
    assert (cache.free_memory_fraction, cache.dtype, cache.block_size, cache.chunk_blocks) == (0.4, "int8", 64, 3)
    assert (cache.enable_block_reuse, made.model.dtype) == (False, "float32")
    assert engine_config(None, {"quant_policy": 4}).kv_cache.dtype == "int4"
    torch = engine_config(PytorchEngineConfig(adapters={"doll": "/weights/doll"}, eager_mode=True), {})
    assert (torch.lora.enabled, torch.lora.directories) == (True, {"doll": "/weights/doll"})
    assert torch.model.cuda_graphs is False


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cache_max_entry_count": 1e308}, "a share between 0 and 1 is expected"),
        ({"cache_max_entry_count": float("nan")}, "a share between 0 and 1 is expected"),
        ({"cache_max_entry_count": 5}, "a share between 0 and 1 is expected"),
        ({"quant_policy": 16}, "0, 4 or 8 is expected"),
        ({"quant_policy": [8]}, "0, 4 or 8 is expected"),
        ({"rope_scaling_factor": 2.0}, "rope scaling is that of config.json"),
        ({"devices": [1]}, "devices are chosen by model.device"),
        ({"revision": "main"}, "a directory holds one revision"),
        ({"session_len": -1}, "max_seq_len"),
        ({"max_batch_size": "x"}, "max_batch_size"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((NotHere, ParameterError, ConfigError), match=text):
        engine_config(TurbomindEngineConfig(**fields), {})


def test_a_wrong_name_is_a_type_error_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"'sesion_len'; did you mean session_len\?"):
        TurbomindEngineConfig(sesion_len=3)
    with pytest.raises(TypeError, match=r"sesion_len of TurbomindEngineConfig .*; did you mean session_len\?"):
        pipeline(sesion_len=3)
    with pytest.raises(TypeError, match="backend_config is a dict, a TurbomindEngineConfig"):
        pipeline(None, {"tp": 1})
    with pytest.raises(NotHere, match="model_name chooses a chat template by its name"):
        pipeline(model_name="llama2")


def test_without_do_sample_the_answer_is_the_most_likely_one() -> None:
    plain = sampling_params(None)
    assert plain.is_greedy and plain.max_tokens == 512
    assert sampling_params(GenerationConfig(temperature=0.9, top_k=7, top_p=0.5, random_seed=3)).is_greedy
    sampled = sampling_params(GenerationConfig(do_sample=True, top_k=0, random_seed=3))
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (0.8, 1.0, None, 3)
    seeds = {sampling_params(GenerationConfig(do_sample=True)).seed for _ in range(8)}
    assert len(seeds) == 8


def test_generation_fields_reach_the_request() -> None:
    made = sampling_params(
        GenerationConfig(
            max_new_tokens=9, stop_words=["a"], bad_words=["b"], stop_token_ids=[4], bad_token_ids=[5], min_new_tokens=2,
            logprobs=3, skip_special_tokens=False, ignore_eos=True, repetition_penalty=1.5, output_logits="all",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
        )
    )  # fmt: skip
    assert (made.max_tokens, made.stop, made.bad, made.stop_token_ids, made.bad_token_ids) == (
        9,
        ["a"],
        ["b"],
        [4],
        [5],
    )
    assert (made.min_tokens, made.logprobs, made.skip_special_tokens, made.ignore_eos) == (2, 3, False, True)
    assert (made.repetition_penalty, made.return_context_logits, made.return_generation_logits) == (1.5, True, True)
    assert made.guided_decoding is not None and made.guided_decoding.json == {"type": "integer"}
    regex = sampling_params(GenerationConfig(response_format={"type": "regex_schema", "regex_schema": "a+"}))
    assert regex.guided_decoding is not None and regex.guided_decoding.regex == "a+"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 2}, "one answer is made of a prompt"),
        ({"max_new_tokens": -1}, "a number from 0"),
        ({"max_new_tokens": 1e308}, "a number from 0"),
        ({"temperature": float("inf")}, "a number from 0 to 2"),
        ({"temperature": float("nan")}, "a number from 0 to 2"),
        ({"top_p": True}, "a number from 0 to 1"),
        ({"output_logits": "some"}, "it is 'generation', 'all' or None"),
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"response_format": [[[]]]}, "response_format is"),
        ({"logits_processors": [print]}, "whose form is another"),
    ],
)
def test_a_generation_field_that_cannot_be_is_refused_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((NotHere, ParameterError), match=text):
        sampling_params(GenerationConfig(**fields))
