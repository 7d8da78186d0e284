"""The examples of document 002, line by line as they are written there, apart from the package's name and these corrections:

`SchedulerConfig(policy=...)` and `KvCacheRetentionConfig(max_tokens=...)` exist in no TensorRT-LLM, and the adapter of 5.4 is
refused by its name. Section 5 first, then what sections 6 and 7 show of the same objects.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.llm import GenerationExecutor, LoRARequest, RequestError, SamplingParams

prompt_token_ids = [1, 15043, 29892, 920, 526, 366]  # "Hello, how are you"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, tokenizer_dir: Path) -> Iterator[Path]:
    """A working directory in which the document's relative paths exist."""
    work = tmp_path_factory.mktemp("work")
    for name in ("llama-3-8b-engine", "engine"):
        shutil.copytree(model_dir, work / name)
    for name in ("llama-3-8b", "tokenizer"):
        shutil.copytree(tokenizer_dir, work / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        yield work


@pytest.fixture(scope="module")
def executor(work: Path) -> Iterator[GenerationExecutor]:
    executor = GenerationExecutor.create(
        engine_dir="./llama-3-8b-engine",
        tokenizer_dir="./llama-3-8b",
    )
    yield executor
    executor.shutdown()


@pytest.fixture
def sampling_params() -> SamplingParams:
    return SamplingParams(
        max_tokens=100,
        temperature=0.8,
        top_p=0.95,
        seed=7,  # the document has none; tests compare samples of two requests
    )


@pytest.mark.feature("002-33")
def test_5_1_basic_generation(executor: GenerationExecutor, sampling_params: SamplingParams) -> None:
    result = executor.generate_async(
        prompt_token_ids=prompt_token_ids,
        sampling_params=sampling_params,
    )
    output = result.result()
    print("Generated:", output.text)
    assert output.text and output.finish_reason in ("stop", "length")


@pytest.mark.feature("002-21", "002-23")
def test_5_2_streaming(
    executor: GenerationExecutor, sampling_params: SamplingParams, capsys: pytest.CaptureFixture[str]
) -> None:
    result = executor.generate_async(
        prompt_token_ids=prompt_token_ids,
        sampling_params=sampling_params,
        streaming=True,
    )
    print("Streaming: ", end="")
    for output in result:
        print(output.text_diff, end="", flush=True)
    print()
    assert capsys.readouterr().out == f"Streaming: {result.text}\n"


def test_2_2_and_3_3_other_ways_to_wait(executor: GenerationExecutor, sampling_params: SamplingParams) -> None:
    async def generate() -> object:
        result = executor.generate_async(prompt_token_ids, sampling_params)
        output = await result.aresult()
        return output

    whole = asyncio.run(generate()).text
    result = executor.generate_async(
        prompt_token_ids=[1, 15043, 29892, 920, 526, 366],
        sampling_params=sampling_params,
        streaming=True,
    )
    prev_text, pieces = "", []
    for output in result:
        new_text = output.text[len(prev_text) :]
        pieces.append(new_text)
        prev_text = output.text
    assert "".join(pieces) == whole

    async def stream() -> str:
        result = executor.generate_async(prompt_token_ids, sampling_params, streaming=True)
        text = ""
        async for output in result:
            text += output.text_diff
        return text

    assert asyncio.run(stream()) == whole


@pytest.mark.feature("002-06")
def test_5_3_batch(executor: GenerationExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    prompt_token_ids_list = [
        [1, 15043, 29892],  # "Hello,"
        [1, 3532, 825],  # "What is"
        [1, 1724, 437],  # "How to"
    ]
    sampling_params_list = [
        SamplingParams(max_tokens=50, temperature=0.7),
        SamplingParams(max_tokens=100, temperature=0.9),
        SamplingParams(max_tokens=80, temperature=0.8),
    ]
    results = executor.generate(
        prompt_token_ids=prompt_token_ids_list,
        sampling_params=sampling_params_list,
    )
    for i, result in enumerate(results):
        print(f"Result {i}: {result.result().text}")
    assert capsys.readouterr().out.count("Result ") == 3
    assert [result.prompt_token_ids for result in results] == prompt_token_ids_list


@pytest.mark.feature("002-45")
def test_5_4_an_adapter_needs_an_engine_that_takes_them(
    executor: GenerationExecutor, sampling_params: SamplingParams
) -> None:
    lora_request = LoRARequest(
        lora_name="math_lora",
        lora_int_id=1,
        lora_path="./lora_weights/math",
    )
    result = executor.generate_async(
        prompt_token_ids=prompt_token_ids,
        sampling_params=sampling_params,
        lora_request=lora_request,
    )
    with pytest.raises(RequestError, match="LoRA is not enabled"):
        result.result()


@pytest.mark.feature("002-25")
def test_6_2_post_processing_workers(executor: GenerationExecutor, work: Path, sampling_params: SamplingParams) -> None:
    with GenerationExecutor.create(
        engine_dir="./engine",
        num_postprocess_workers=4,
        postprocess_tokenizer_dir="./tokenizer",
    ) as other:
        text = other.generate(prompt_token_ids, sampling_params).text
    assert text == executor.generate(prompt_token_ids, sampling_params).text


@pytest.mark.feature("002-19", "002-31")
def test_question_1_a_request_that_takes_too_long(executor: GenerationExecutor) -> None:
    result = executor.generate_async(prompt_token_ids, SamplingParams(max_tokens=450, ignore_eos=True))
    try:
        result.result(timeout=0.0)
    except TimeoutError:
        executor.abort_request(result.request.id)
    assert result.result(60).finish_reason == "cancelled"


@pytest.mark.feature("002-30")
def test_question_2_how_full_the_batch_is(executor: GenerationExecutor) -> None:
    stats = executor.get_latest_stats()
    print(f"Active requests: {stats.num_active_requests}")
    print(f"Queued requests: {stats.num_queued_requests}")
    print(f"Batch size: {stats.current_batch_size}")
    assert stats.num_queued_requests == 0
