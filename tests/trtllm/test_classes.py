"""Every class of section B, against tests/trtllm/facts.py: arguments, defaults, fixed attributes, pickle, equality, errors."""

from __future__ import annotations

import copy
import pickle
import pydoc
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from compat import trtllm
from compat.trtllm import bindings
from tests.trtllm.config_facts import CONFIGS, GPT_MANAGER
from tests.trtllm.facts import REQUEST_SIDE, RESULTS, Facts

CLASSES = [*REQUEST_SIDE, *CONFIGS, *GPT_MANAGER]
each_class = pytest.mark.parametrize("facts", CLASSES, ids=lambda facts: f"{facts.cls.__module__}.{facts.cls.__name__}")
ATTRIBUTES = {"type": "request_type"}  # where the attribute is not called as the argument


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one == other and type(one) is type(other)


def value_of(record: Any, argument: str) -> Any:
    return getattr(record, ATTRIBUTES.get(argument, argument))


@each_class
def test_arguments_by_name_become_attributes(facts: Facts) -> None:
    record = facts.cls(**facts.arguments)
    assert [name for name, value in facts.arguments.items() if not alike(value_of(record, name), value)] == []


@each_class
def test_positional_arguments_come_in_the_documented_order_and_no_more_of_them(facts: Facts) -> None:
    values = list(facts.arguments.values())
    first = values[: facts.num_positional]
    record = facts.cls(*first)
    assert [alike(value_of(record, name), value) for name, value in zip(facts.arguments, first)] == [True] * len(first)
    if facts.num_positional < len(values):
        with pytest.raises(TypeError, match="argument types are supported"):
            facts.cls(*values)


def required(facts: Facts) -> dict[str, Any]:
    return dict(list(facts.arguments.items())[: facts.num_required])


@each_class
def test_what_is_left_out_has_the_documented_default(facts: Facts) -> None:
    record = facts.cls(**required(facts))
    found = {name: value_of(record, name) for name in facts.defaults}
    assert {name for name, value in found.items() if not alike(value, facts.defaults[name])} == set(), found


@each_class
def test_required_arguments_must_be_given(facts: Facts) -> None:
    for name in required(facts):
        with pytest.raises(TypeError, match=f"{name} is missing"):
            facts.cls(**{other: value for other, value in required(facts).items() if other != name})


@pytest.mark.feature("000-55")
@each_class
def test_a_pickle_holds_all_attributes(facts: Facts) -> None:
    record = facts.cls(**facts.arguments)
    twin = pickle.loads(pickle.dumps(record))
    assert twin == record and type(twin) is facts.cls
    assert [name for name, value in facts.arguments.items() if not alike(value_of(twin, name), value)] == []


@each_class
def test_equality_is_by_value_and_repr_shows_it(facts: Facts) -> None:
    record = facts.cls(**facts.arguments)
    assert record == facts.cls(**facts.arguments) and record != object()
    name = next(iter(facts.arguments))
    assert facts.cls.__name__ in repr(record) and ATTRIBUTES.get(name, name) in repr(record)


@each_class
def test_unknown_arguments_are_refused_with_the_signature(facts: Facts) -> None:
    with pytest.raises(TypeError) as caught:
        facts.cls(**facts.arguments, no_such_argument=1)
    text = str(caught.value)
    assert "no_such_argument=1" in text and all(name in text for name in facts.arguments)


@each_class
def test_attributes_are_fixed_or_not_as_documented(facts: Facts) -> None:
    record = facts.cls(**facts.arguments)
    fixed = facts.read_only
    for name, value in facts.arguments.items():
        if fixed or (name in ("input_token_ids", "max_tokens") and facts.cls is trtllm.Request):
            with pytest.raises(AttributeError, match="has no setter"):
                setattr(record, ATTRIBUTES.get(name, name), value)
        else:
            setattr(record, ATTRIBUTES.get(name, name), value)


@each_class
def test_other_attributes_can_be_set_only_where_that_is_documented(facts: Facts) -> None:
    record = facts.cls(**facts.arguments)
    if facts.dynamic:
        record.of_no_field = "pytorch"
        assert pickle.loads(pickle.dumps(record)).of_no_field == "pytorch"
        assert record != facts.cls(**facts.arguments)
    else:
        with pytest.raises(AttributeError, match="has no attribute 'of_no_field'"):
            record.of_no_field = "pytorch"


@each_class
def test_help_shows_the_class_with_a_text_and_its_arguments(facts: Facts) -> None:
    page = pydoc.plain(pydoc.render_doc(facts.cls))
    assert facts.cls.__doc__ and facts.cls.__doc__.splitlines()[0] in page
    assert all(name in page for name in facts.arguments)


@pytest.mark.parametrize("make", RESULTS, ids=lambda cls: cls.__name__)
def test_results_start_with_the_documented_values_and_all_can_be_set(make: Any) -> None:
    record = make()
    for name, value in RESULTS[make].items():
        assert alike(getattr(record, name), value), name
        setattr(record, name, value)
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize(
    "make",
    [
        lambda: trtllm.SamplingConfig(1.5),
        lambda: trtllm.SamplingConfig(top_k="2"),
        lambda: trtllm.SamplingConfig(seed=-1),
        lambda: trtllm.SamplingConfig(temperature="1"),
        lambda: trtllm.SamplingConfig(beam_width=1 << 31),
        lambda: trtllm.Request("abc", 1),
        lambda: trtllm.Request([1.5], 1),
        lambda: trtllm.Request([1], 1, stop_words=[1]),
        lambda: trtllm.Request([1], 1, embedding_bias=[0.0]),
        lambda: trtllm.Request([1], 1, sampling_config=trtllm.OutputConfig()),
        lambda: trtllm.Request([1], 1, allotted_time_ms=5),
        lambda: trtllm.Request([1], 1, True),
        lambda: trtllm.ExecutorConfig(batching_type=1),
        lambda: trtllm.ExecutorConfig(kv_cache_config={}),
        lambda: trtllm.KvCacheConfig(max_attention_window=5),
        lambda: trtllm.KvCacheConfig(enable_block_reuse="yes"),
        lambda: trtllm.LogitsPostProcessorConfig({"a": 1}),
        lambda: trtllm.OutputConfig(True, return_log_probs=True),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error(make: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        make()


def test_setting_a_value_of_the_wrong_type_is_a_type_error_and_changes_nothing() -> None:
    config = trtllm.SamplingConfig(top_k=3)
    with pytest.raises(TypeError, match="top_k is 'x'"):
        config.top_k = "x"
    assert config.top_k == 3


def test_what_pybind_converts_is_converted() -> None:
    request = trtllm.Request(np.array([1, 2], dtype=np.int32), np.int64(5), end_id=torch.tensor(3), streaming=1)
    assert request.input_token_ids == [1, 2] and all(type(token) is int for token in request.input_token_ids)
    assert (request.max_tokens, request.end_id, request.streaming) == (5, 3, True)
    assert type(trtllm.SamplingConfig(temperature=1).temperature) is float
    assert trtllm.Request((1, 2), 3).input_token_ids == [1, 2]
    sizes = trtllm.LookaheadDecodingConfig(np.int32(3), np.array([5]), np.array([[7]]))
    assert sizes == trtllm.LookaheadDecodingConfig(3, 5, 7) and type(sizes.max_ngram_size) is int
    for wrong in (np.array([3, 4]), np.array([0.5]), np.array(["3"])):
        with pytest.raises(TypeError, match="max_window_size is"):
            trtllm.LookaheadDecodingConfig(wrong)


def test_a_name_without_a_post_processor_is_taken_and_is_none() -> None:
    assert trtllm.LogitsPostProcessorConfig({"x": None}).processor_map == {"x": None}


def test_the_change_of_a_value_in_a_kv_event_has_upstreams_name() -> None:
    change = trtllm.kv_cache.KVCacheEventDiffInt(35, 80)
    assert (change.old_value, change.new_value) == (35, 80)


@pytest.mark.feature("000-11")
def test_a_request_without_tokens_or_without_room_for_output_is_refused() -> None:
    with pytest.raises(RuntimeError, match="input_token_ids is empty"):
        trtllm.Request([], 1)
    with pytest.raises(RuntimeError, match="max_tokens is 0"):
        trtllm.Request([1], 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: trtllm.KvCacheConfig(free_gpu_memory_fraction=0.0), "free_gpu_memory_fraction is 0.0"),
        (lambda: trtllm.KvCacheConfig(free_gpu_memory_fraction=1.5), "free_gpu_memory_fraction is 1.5"),
        (lambda: trtllm.KvCacheConfig(max_tokens=0), "max_tokens is 0"),
        (lambda: trtllm.ExecutorConfig(0), "max_beam_width is 0"),
        (lambda: trtllm.ExecutorConfig(iter_stats_max_iterations=-1), "iter_stats_max_iterations is -1"),
        (lambda: bindings.KvCacheConfig(free_gpu_memory_fraction=-0.5), "free_gpu_memory_fraction is -0.5"),
        (lambda: bindings.TrtGptModelOptionalParams(max_beam_width=0), "max_beam_width is 0"),
    ],
)
@pytest.mark.feature("001-68")
def test_a_value_out_of_its_range_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(RuntimeError, match=said.replace(".", r"\.")):
        make()


def test_the_parts_of_a_configuration_are_references() -> None:
    config = trtllm.ExecutorConfig()
    config.kv_cache_config.max_tokens = 42
    assert config.kv_cache_config.max_tokens == 42
    assert trtllm.ExecutorConfig().kv_cache_config.max_tokens is None, "the default is no object that all share"


def test_a_part_that_is_given_is_copied() -> None:
    part = trtllm.KvCacheConfig(max_tokens=1)
    one, two = trtllm.ExecutorConfig(kv_cache_config=part), trtllm.ExecutorConfig(kv_cache_config=part)
    part.max_tokens = 2
    one.kv_cache_config.max_tokens = 3
    assert (one.kv_cache_config.max_tokens, two.kv_cache_config.max_tokens) == (3, 1)
    request = trtllm.Request([1], 1, sampling_config=(sampling := trtllm.SamplingConfig()))
    sampling.top_k = 5
    assert request.sampling_config.top_k is None


def test_runtime_defaults_fill_what_is_empty() -> None:
    defaults = trtllm.RuntimeDefaults(max_attention_window=[1, 2], sink_token_length=4)
    filled = trtllm.KvCacheConfig(runtime_defaults=defaults)
    assert (filled.max_attention_window, filled.sink_token_length) == ([1, 2], 4)
    kept = trtllm.KvCacheConfig(max_attention_window=[9])
    kept.fill_empty_fields_from_runtime_defaults(defaults)
    assert (kept.max_attention_window, kept.sink_token_length) == ([9], 4)


def test_tensors_are_compared_by_value_shape_and_kind() -> None:
    ones = trtllm.PromptTuningConfig(torch.ones(2, 2))
    assert ones == trtllm.PromptTuningConfig(torch.ones(2, 2))
    others = (torch.zeros(2, 2), torch.ones(4), torch.ones(2, 2, dtype=torch.float64))
    assert [ones != trtllm.PromptTuningConfig(other) for other in others] == [True] * 3


def test_copies_are_independent() -> None:
    config = trtllm.SamplingConfig(top_k=1)
    twin = copy.copy(config)
    twin.top_k = 2
    assert config.top_k == 1


def test_one_attention_window_may_be_a_number_for_gpt_manager() -> None:
    assert bindings.KvCacheConfig(max_attention_window=8).max_attention_window == [8]


def test_a_timedelta_is_kept_exactly() -> None:
    span = timedelta(seconds=1, microseconds=1)
    assert trtllm.Request([1], 1, allotted_time_ms=span).allotted_time_ms == span
