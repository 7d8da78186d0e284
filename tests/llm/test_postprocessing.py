"""Post-processing workers: the same text from processes as from the dispatching thread, and errors of one request alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from backend.api import ConfigError, EverbatchError, FinishReason, Response
from backend.text.tokenizer import Tokenizer
from compat.llm import (
    AdditionalModelOutput,
    BackgroundError,
    GenerationExecutor,
    GenerationExecutorWorker,
    PostprocWorker,
    PostprocWorkerConfig,
    RequestError,
    SamplingParams,
    postprocessing,
)
from compat.llm import worker as llm_worker
from compat.llm.updates import TextParams
from tests.llm.helpers import PATIENCE_S, Engine, make_worker, params, part
from tests.llm.raising_postproc import ENDS, RAISES, RaisingTokenizer
from tests.text.tokenizers_made import byte_level_bpe, write_directory

LENGTH = FinishReason.LENGTH
RAISING = "tests.llm.raising_postproc"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_directory(tmp_path_factory.mktemp("tokenizer"), *byte_level_bpe()))


@pytest.fixture(scope="module")
def four(tokenizer: Tokenizer, directory: str) -> Iterator[GenerationExecutorWorker]:
    """Four processes, with a tokenizer directory of their own."""
    config = PostprocWorkerConfig(4, directory)
    with make_worker(tokenizer, tokenizer_dir="not there", postprocess=config) as worker:
        yield worker


def steps(worker: GenerationExecutorWorker, **fields: object) -> list[list[tuple[str, list[int]]]]:
    """(text, token ids) of each step of ten streams."""
    results = [worker.generate_async([i + 1, 2], params(24, **fields), streaming=True) for i in range(10)]
    return [[(step.text_diff, step.outputs[0].token_ids_diff) for step in result] for result in results]


@pytest.mark.feature("002-25", "002-26")
@pytest.mark.parametrize("fields", [{}, {"stop": "e"}, {"logprobs": 0, "n": 1}])
def test_four_processes_make_the_same_text_in_the_same_order_as_none(
    four: GenerationExecutorWorker, tokenizer: Tokenizer, fields: dict
) -> None:
    with make_worker(tokenizer) as inline:
        assert inline.postprocess_pids == []
        assert steps(four, **fields) == steps(inline, **fields)
        assert [o.outputs for o in four.generate([[1], [2]], params(9, **fields))] == [
            o.outputs for o in inline.generate([[1], [2]], params(9, **fields))
        ]


@pytest.mark.feature("002-25")
def test_the_processes_are_others_and_a_request_belongs_to_the_one_of_its_number(
    four: GenerationExecutorWorker,
) -> None:
    assert len(set(four.postprocess_pids) | {os.getpid()}) == 5
    sent: list[tuple[int, int]] = []
    for number, process in enumerate(four._pool._workers):
        real = process.send
        process.send = lambda given, number=number, real=real: (sent.append((given.client_id, number)), real(given))
    results = [four.generate_async([i + 1], params(4), streaming=True) for i in range(8)]
    for result in results:
        result.result(PATIENCE_S)
    assert {client_id for client_id, _ in sent} == {result.request_id for result in results}
    assert all(number == client_id % 4 for client_id, number in sent)


@pytest.mark.feature("002-25")
def test_the_processes_end_with_the_executor(tokenizer: Tokenizer, directory: str) -> None:
    worker = make_worker(tokenizer, tokenizer_dir=directory, postprocess=PostprocWorkerConfig(2))
    pids = worker.postprocess_pids
    worker.generate([1], params(2))
    worker.shutdown()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.feature("002-27")
@pytest.mark.parametrize(
    "asked",
    [
        {"return_context_logits": True},
        {"return_generation_logits": True},
        {"additional_model_outputs": [AdditionalModelOutput("logits")]},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_logits_do_not_go_through_workers(four: GenerationExecutorWorker, asked: dict) -> None:
    with pytest.raises(ValueError, match="logits do not go through post-processing workers"):
        four.generate_async([1], params(**asked))
    with pytest.raises(ValueError, match="logits do not go through post-processing workers"):
        GenerationExecutor.create("nowhere", return_logits=True, num_postprocess_workers=1)


@pytest.mark.feature("002-57")
def test_an_error_in_a_worker_ends_its_own_request(directory: str, tokenizer: Tokenizer) -> None:
    config = PostprocWorkerConfig(1, directory)
    engine = Engine(tokenizer, config, postprocess_module=RAISING)
    other = engine.worker.generate_async([1], params(), streaming=True)
    bad = engine.worker.generate_async([1], params(), streaming=True)
    engine.say(part([40]), 0)
    engine.say(part([RAISES]), 1)
    with pytest.raises(RequestError, match="the output could not be made into text; the log says why"):
        bad.result(PATIENCE_S)
    assert engine.cancelled == [engine.engine_id(1)], "nobody wants the rest of it"
    engine.say(part([41], finish=LENGTH, is_final=True), 0)
    assert other.result(PATIENCE_S).token_ids == [40, 41]
    engine.worker.shutdown()


@pytest.mark.feature("002-57")
def test_an_error_without_workers_ends_its_own_request_too(directory: str) -> None:
    engine = Engine(RaisingTokenizer.from_directory(directory))
    other, bad = (engine.worker.generate_async([1], params()) for _ in range(2))
    engine.say(part([RAISES]), 1)
    engine.say(part([40], finish=LENGTH, is_final=True), 0)
    with pytest.raises(RequestError, match="could not be made into text"):
        bad.result(PATIENCE_S)
    assert other.result(PATIENCE_S).token_ids == [40]
    assert engine.worker._inline.num_requests == 0
    engine.worker.shutdown()


def test_the_requests_of_a_process_that_ends_fail_and_so_do_those_that_follow(
    directory: str, tokenizer: Tokenizer
) -> None:
    engine = Engine(tokenizer, PostprocWorkerConfig(1, directory), postprocess_module=RAISING)
    lost, other = (engine.worker.generate_async([1], params()) for _ in range(2))
    engine.say(part([ENDS]), 0)
    for result in (lost, other):
        with pytest.raises(BackgroundError, match="a post-processing process has ended"):
            result.result(PATIENCE_S)
    later = engine.worker.generate_async([1], params())
    engine.say(part([40], finish=LENGTH, is_final=True))
    with pytest.raises(BackgroundError):
        later.result(PATIENCE_S)
    engine.worker.shutdown()


def test_pending_requests_of_processes_fail_at_the_end(directory: str, tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, PostprocWorkerConfig(2, directory))
    pending = [engine.worker.generate_async([1], params()) for _ in range(4)]
    engine.worker.shutdown()
    for result in pending:
        with pytest.raises(Exception, match="shut down|engine has stopped"):
            result.result(PATIENCE_S)


def test_a_process_that_hangs_does_not_hold_up_the_end(
    directory: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (postprocessing, llm_worker):
        monkeypatch.setattr(module, "END_GRACE_S", 0.2)
    engine = Engine(tokenizer, PostprocWorkerConfig(1, directory))
    result = engine.worker.generate_async([1], params(), streaming=True)
    (pid,) = engine.worker.postprocess_pids
    os.kill(pid, signal.SIGSTOP)
    for _ in range(20):  # More than a socket holds, so that sending blocks.
        engine.say(part([5] * 50_000))
    closer = threading.Thread(target=engine.worker.shutdown)
    closer.start()
    try:
        closer.join(20.0)
        assert not closer.is_alive()
        with pytest.raises(EverbatchError):
            result.result(PATIENCE_S)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_tokenizer_that_the_processes_cannot_read_is_told_at_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model directory has no tokenizer.json"):
        make_worker(tokenizer, postprocess=PostprocWorkerConfig(2, str(tmp_path)))


def test_the_number_of_processes_is_bounded() -> None:
    assert PostprocWorkerConfig().enabled is False
    with pytest.raises(ValueError, match="num_postprocess_workers is 65, allowed is 0 to 64"):
        PostprocWorkerConfig(65)


@pytest.mark.feature("002-25")
def test_a_worker_takes_inputs_and_gives_outputs(tokenizer: Tokenizer) -> None:
    worker = PostprocWorker(tokenizer)
    ids = tokenizer.encode("the fox")
    how = TextParams(streaming=True)
    first = worker.handle(PostprocWorker.Input(Response(1, None, part(ids[:1])), 5, how, None, True))
    assert isinstance(first, PostprocWorker.Output)
    assert (first.client_id, first.is_final, first.error, first.res[0].text) == (5, False, "", "the")
    last = worker.handle(PostprocWorker.Input(Response(1, None, part(ids[1:], finish=LENGTH, is_final=True)), 5))
    assert (last.is_final, last.res[0].text, worker.num_requests) == (True, " fox", 0)
    assert worker.handle(PostprocWorker.Input(Response(1, None, part([9])), 5)) is None, "it is over here"
    error = worker.handle(PostprocWorker.Input(Response(1, None, error_or_none="no"), 6))
    assert (error.is_final, error.error) == (True, "no")
    assert SamplingParams().detokenize
