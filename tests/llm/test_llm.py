"""LLM: prompts of all kinds, over a real model in this process."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from backend.api import ConfigError, EngineConfig, EngineUnavailable, EverbatchError
from backend.api.config.schema import RecordsConfig
from backend.text.tokenizer import Tokenizer
from compat.llm import LLM, BatchError, NotHere, ParameterError, RequestError, RequestOutput, SamplingParams
from compat.llm.arguments import LlmArguments
from compat.llm.llm import with_bar
from tests.llm.helpers import CONFIG, EVER, PATIENCE_S, expected, gated, make_worker, params

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog"]
FEW = SamplingParams(max_tokens=6, ignore_eos=True)


def test_one_prompt_gives_one_output_and_a_list_a_list_in_its_order(llm: LLM) -> None:
    one = llm.generate(TEXTS[0], FEW)
    assert isinstance(one, RequestOutput)
    assert (one.prompt, one.prompt_token_ids) == (TEXTS[0], llm.tokenizer.encode(TEXTS[0]))
    several = llm.generate(TEXTS, FEW)
    assert [output.prompt for output in several] == TEXTS
    assert several[0].outputs == one.outputs and len(several[0].outputs[0].token_ids) == 6
    assert llm.generate([], FEW) == []
    (alone,) = llm.generate(TEXTS[:1], FEW)
    assert alone.outputs == one.outputs


def test_a_list_of_ints_is_one_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXTS[1])
    output = llm.generate(ids, FEW)
    assert (output.prompt, output.prompt_token_ids) == (None, ids)
    assert output.outputs == llm.generate(TEXTS[1], FEW).outputs
    cut = {"prompt_token_ids": ids[:2], "query_token_ids": ids[2:]}
    assert llm.generate(cut, FEW).outputs == output.outputs
    mixed = llm.generate([ids, TEXTS[1], {"prompt": TEXTS[1]}, {"prompt_token_ids": ids}], FEW)
    assert [each.outputs for each in mixed] == [output.outputs] * 4


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [output.outputs[0].length for output in llm.generate(TEXTS, each)] == [1, 5, 3]
    with pytest.raises(ValueError, match="sampling_params has 2 entries, and there are 3 prompts"):
        llm.generate(TEXTS, each[:2])


def test_a_further_turn_is_told_what_was_reused_of_the_one_before(llm: LLM) -> None:
    """One program is one party: without a cache salt, too."""
    turn = list(range(300, 400))
    asked = SamplingParams(max_tokens=4, ignore_eos=True, return_perf_metrics=True)
    first = llm.generate(turn, asked).outputs[0]
    second = llm.generate([*turn, *first.token_ids, 7], asked).outputs[0].request_perf_metrics
    assert first.request_perf_metrics.num_cached_tokens == 0
    assert second.num_cached_tokens == 103 and second.num_reused_blocks == 3  # the last token was never run


def test_the_latest_statistics_are_those_of_this_moment(llm: LLM) -> None:
    running = llm.generate_async(TEXTS[0], SamplingParams(max_tokens=400, ignore_eos=True), streaming=True)
    next(iter(running))
    assert llm.executor.get_latest_stats().num_active_requests == 1
    running.abort()
    running.result(PATIENCE_S)
    assert llm.executor.get_latest_stats().num_active_requests == 0


@pytest.mark.feature("002-52")
def test_parameters_of_one_request_do_not_touch_another_of_its_batch(llm: LLM) -> None:
    each = [
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5, seed=7),
        FEW,
        SamplingParams(max_tokens=8, ignore_eos=True, top_k=40, top_p=0.9, seed=8),
    ]
    together = llm.generate(TEXTS, each)
    alone = [llm.generate(text, sampling) for text, sampling in zip(TEXTS, each)]
    assert [output.outputs for output in together] == [output.outputs for output in alone]


def test_a_stream_and_a_coroutine_say_the_same_as_a_call(llm: LLM) -> None:
    whole = llm.generate(TEXTS[0], FEW)
    streamed = llm.generate_async(TEXTS[0], FEW, streaming=True)
    assert isinstance(streamed, RequestOutput) and streamed.prompt == TEXTS[0]
    assert "".join(step.text_diff for step in streamed) == whole.text

    async def run() -> RequestOutput:
        return await llm.generate_async(TEXTS[0], FEW)

    assert asyncio.run(run()).outputs == whole.outputs


def test_the_last_tokens_of_a_prompt_are_kept(llm: LLM) -> None:
    cut = SamplingParams(max_tokens=2, truncate_prompt_tokens=3)
    assert llm.generate(TEXTS[0], cut).prompt_token_ids == llm.tokenizer.encode(TEXTS[0])[-3:]
    assert llm.generate([5, 6, 7, 8], cut).prompt_token_ids == [6, 7, 8]


def test_an_output_is_not_made_by_users_and_an_llm_does_not_travel(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="not designed to be constructed by users"):
        RequestOutput()
    with pytest.raises(RuntimeError, match="LLM object can not be pickled"):
        pickle.dumps(llm)


def test_a_prompt_that_fails_does_not_stop_the_others() -> None:
    """One fails before it is sent, one in the engine; their exception holds what the others have become."""
    prompts = [[1], [1, 2, 3, 4], [5000], [1, 2]]
    with LLM.from_executor(make_worker(), max_input_len=3) as llm:
        with pytest.raises(
            BatchError, match=r"prompt 1: .*the limit is 3 \(max_input_len\).* \(2 of 4 prompts failed"
        ) as info:
            llm.generate(prompts, params(3))
        assert {n: type(error) for n, error in info.value.errors.items()} == {1: ParameterError, 2: RequestError}
        assert "input token 5000 is outside the vocabulary" in info.value.errors[2].message
        outputs = info.value.outputs
        assert [output and output.outputs[0].token_ids for output in outputs] == [
            expected([1], 3),
            None,
            None,
            expected([1, 2], 3),
        ]
        with pytest.raises(RequestError, match="^input token 5000 is outside"):
            llm.generate([5000], params(3))


def test_an_interrupt_aborts_what_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with gated() as (worker, gate), LLM.from_executor(worker) as llm:
        monkeypatch.setattr(
            RequestOutput, "result", lambda self, timeout=None: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        gate.clear()
        threading.Timer(0.05, gate.set).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], params(EVER))
        monkeypatch.undo()
        assert worker.generate([1, 2], params(3)).token_ids == expected([1, 2], 3)
        assert worker.get_latest_stats().num_active_requests == 0


def test_what_a_prompt_is_may_not_be_guessed(llm: LLM) -> None:
    with pytest.raises(TypeError, match="prompt_token_ids is a float"):
        llm.generate(1.5)
    with pytest.raises(ValueError, match="a prompt has the key 'promt'"):
        llm.generate({"promt": "x"})
    with pytest.raises(TypeError, match="sampling_params is a dict"):
        llm.generate("x", {"max_tokens": 1})
    with pytest.raises(TypeError, match="lora_request is a object, a LoRARequest is needed"):
        llm.generate("x", lora_request=object())


@pytest.mark.feature("002-29")
def test_statistics_are_a_list_or_an_asynchronous_iterator_that_ends(llm: LLM) -> None:
    llm.generate(TEXTS, FEW)
    llm.executor.engine_executor._transport._loop._next_stats = 0.0
    llm.generate(TEXTS, FEW)
    (*_, last) = llm.get_stats(timeout=PATIENCE_S)
    assert {"iter", "iterLatencyMS", "numActiveRequests", "numQueuedRequests", "kvCacheStats"} <= set(last)
    assert last["kvCacheStats"]["tokensPerBlock"] == 32 and last["inflightBatchingStats"]["numScheduledRequests"] >= 0

    async def collect() -> list[int]:
        llm.executor.engine_executor._transport._loop._next_stats = 0.0
        llm.generate(TEXTS, FEW)
        return [record["iter"] async for record in llm.get_stats_async(timeout=0.3)]

    iterations = asyncio.run(collect())
    assert iterations == sorted(set(iterations)) and iterations[0] > last["iter"]
    assert llm.get_stats(timeout=0) == [], "each record is handed out once"


@pytest.mark.feature("002-29")
def test_all_iterations_are_told_where_they_are_kept_with_the_requests_in_them() -> None:
    kept = msgspec.structs.replace(CONFIG, records=RecordsConfig(100, 100, 100))
    with LLM.from_executor(make_worker(config=kept)) as llm:
        llm.generate([1, 2, 3, 4, 5], params(5))
        records = llm.get_stats(timeout=PATIENCE_S)
        assert [record["iter"] for record in records] == list(range(records[0]["iter"], records[0]["iter"] + 5))
        assert [record["inflightBatchingStats"]["numGenRequests"] for record in records] == [0, 1, 1, 1, 1]
        assert [record["requestStats"][0]["stage"] for record in records][-1] == "COMPLETE"
        events = llm.get_kv_cache_events(timeout=PATIENCE_S)
        assert [event["event_id"] for event in events] == list(range(len(events)))
        assert events[0]["data"]["type"] == "created"
        stored = next(event["data"] for event in events if event["data"]["type"] == "stored")
        assert [token["token_id"] for token in stored["blocks"][0]["tokens"]] == [1, 2, 3, 4]

        async def collect() -> list[str]:
            llm.generate([6, 7, 8, 9, 10], params(1))
            return [event["data"]["type"] async for event in llm.get_kv_cache_events_async(timeout=0.2)]

        assert "stored" in asyncio.run(collect())


def test_events_that_are_not_kept_are_refused_with_the_setting(llm: LLM) -> None:
    with pytest.raises(NotHere, match="set event_buffer_max_size of kv_cache_config"):
        llm.get_kv_cache_events()


def test_the_tokenizer_is_ours_or_given_or_left_out(llm: LLM, model_dir: Path, tokenizer_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from compat.llm.llm import _as_tokenizer

    assert isinstance(llm.tokenizer, Tokenizer)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tokenizer_dir))
    ours = _as_tokenizer(theirs)
    assert (ours.encode("fox"), ours.eos_ids) == (llm.tokenizer.encode("fox"), (2,))
    with LLM(model_dir, skip_tokenizer_init=True) as without:
        assert without.tokenizer is None
        output = without.generate([5, 6, 7], FEW).outputs[0]
        assert (output.text, output.token_ids) == ("", llm.generate([5, 6, 7], FEW).outputs[0].token_ids)
        with pytest.raises(ValueError, match="the prompt is text, and there is no tokenizer; give token ids"):
            without.generate("text")


def test_a_saved_model_is_loaded_again(llm: LLM, tmp_path: Path) -> None:
    llm.save(tmp_path / "copy")
    with LLM(tmp_path / "copy", max_seq_len=64) as copy:
        assert copy.generate(TEXTS[0], FEW).outputs == llm.generate(TEXTS[0], FEW).outputs
    with pytest.raises(ConfigError, match="copy exists and is not empty; give a new directory"):
        llm.save(tmp_path / "copy")


def test_more_prompts_than_a_server_lets_wait_are_served_however_long_that_takes() -> None:
    own = LlmArguments({"kv_cache_config": {"max_tokens": 1024}, "max_batch_size": 64}).config
    prompts = [[i % 900 + 1, i // 900 + 1] for i in range(EngineConfig().limits.max_queue_size + 200)]
    with gated(config=own) as (worker, gate), LLM.from_executor(worker) as llm:
        gate.clear()
        results = [llm.generate_async(prompt, params(1)) for prompt in prompts]
        gate.set()
        assert [result.result(PATIENCE_S).token_ids for result in results] == [expected(each, 1) for each in prompts]
    assert own.limits.default_timeout_s > 1e6


def test_a_model_without_a_directory_is_not_saved(tmp_path: Path) -> None:
    with LLM.from_executor(make_worker()) as llm:
        with pytest.raises(ConfigError, match="not loaded from a directory"):
            llm.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_processes_are_not_given_a_tokenizer_that_is_an_object(llm: LLM, model_dir: Path) -> None:
    with pytest.raises(ValueError, match="the tokenizer is left out; set num_postprocess_workers to 0"):
        LLM(model_dir, skip_tokenizer_init=True, num_postprocess_workers=1)
    with pytest.raises(ValueError, match="set postprocess_tokenizer_dir to its directory"):
        LLM(model_dir, tokenizer=llm.tokenizer, num_postprocess_workers=1)


def test_a_model_that_is_not_there_is_an_error_without_its_path() -> None:
    with pytest.raises(ConfigError, match="File does not exist"):
        LLM("./no/such/model")


def test_the_end_is_the_end() -> None:
    with LLM.from_executor(make_worker()) as llm:
        pending = llm.generate_async([1], params(EVER))
    with pytest.raises((RequestError, EngineUnavailable)):
        pending.result(PATIENCE_S)
    llm.shutdown()
    with pytest.raises(EngineUnavailable, match="shut down"):
        llm.generate([1])


@pytest.mark.parametrize("is_shown, is_terminal, bar", [(True, True, True), (False, True, False), (True, False, False)])
def test_the_bar_is_for_terminals_and_counts_to_the_end(is_shown: bool, is_terminal: bool, bar: bool) -> None:
    console = Console(force_terminal=is_terminal, width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    assert list(with_bar("abc", 3, is_shown, console)) == list("abc")
    text = console.export_text()
    assert ("Processed requests" in text) is bar
    assert ("3/3" in text) is bar


def test_limits_of_the_llm_hold_for_its_prompts() -> None:
    with LLM.from_executor(make_worker(), max_input_len=3, max_beam_width=2, return_perf_metrics=True) as llm:
        with pytest.raises(ValueError, match=r"the prompt has 4 tokens, the limit is 3 \(max_input_len\)"):
            llm.generate([1, 2, 3, 4])
        with pytest.raises(ValueError, match=r"best_of is 3 beams, the limit is 2 \(max_beam_width\)"):
            llm.generate([1], SamplingParams(n=3, use_beam_search=True))
        assert llm.generate([1, 2, 3], params(2)).outputs[0].request_perf_metrics.num_output_tokens == 2


def test_a_parameter_of_a_wrong_type_fails_its_request_alone() -> None:
    """The engine never sees it: it would end with all requests, because nothing had decoded the request."""
    with LLM.from_executor(make_worker()) as llm:
        with pytest.raises(EverbatchError, match=r"sampling_config.temperature: expected float \| None, got str"):
            llm.generate([1], SamplingParams(temperature="x"))
        with pytest.raises(ValueError, match="max_tokens is 'x', a whole number is needed"):
            SamplingParams(max_tokens="x")
        assert llm.generate([1, 2, 3], params(2)).outputs[0].token_ids == expected([1, 2, 3], 2)


def test_the_widest_beams_of_an_llm_are_those_of_its_engine() -> None:
    assert LlmArguments({"max_beam_width": 12}).config.scheduler.max_beam_width == 12
    with pytest.raises(ConfigError, match="scheduler.max_beam_width is 99, more than scheduler.max_batch_size 64"):
        LlmArguments({"max_beam_width": 99})
