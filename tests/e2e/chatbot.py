"""A client of TurboMind's Triton backend, as LMDeploy's own works: types, inputs, slices and calls are its, of libraries there is
tritonclient only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as grpcclient

from tests.e2e.wire import to_input

TYPES = {
    "request_output_len": np.uint32,
    "runtime_top_k": np.uint32,
    "runtime_top_p": np.float32,
    "temperature": np.float32,
    "repetition_penalty": np.float32,
    "step": np.int32,
    "session_len": np.uint32,
    "START": np.int32,
    "END": np.int32,
    "STOP": np.int32,
    "CORRID": np.uint64,
    "random_seed": np.uint64,
    "beam_width": np.uint32,
}


class Piece(NamedTuple):
    """One response: the text that it adds, the output so far without a trailing EOS, and whether it was marked as the last."""

    text: str
    ids: list[int]
    is_final: bool


class Chatbot:
    """One session. `sequence_length`: tokens of it that the client knows of, which it sends as `step`."""

    def __init__(
        self, url: str, session_id: int, session_len: int = 2048, stop_ids: Sequence[int] = (), **sampling: float
    ) -> None:
        """`stop_ids`: the stop words, of one token each."""
        self._url, self._session_id, self._session_len = url, session_id, session_len
        self._sampling = {"temperature": 1.0, "repetition_penalty": 1.0, **sampling}
        self.sequence_length = 0
        self.history: list[int] = []  # what was sent, and what was shown
        with grpcclient.InferenceServerClient(url) as client:
            config = client.get_model_config("turbomind", as_json=True)["config"]
        self.model_name = config["parameters"]["model_name"]["string_value"]
        self.bos_id = int(self.preprocess("<BOS>")[0][0])
        self.eos_id = int(self.preprocess("<EOS>")[0][-1])
        self._stop_ids = stop_ids

    def preprocess(self, query: str) -> np.ndarray:
        data = np.array([[query]]).astype(object)
        with grpcclient.InferenceServerClient(self._url) as client:
            result = client.infer("preprocessing", [to_input("QUERY", data)])
        ids, lengths = result.as_numpy("INPUT_ID"), result.as_numpy("REQUEST_INPUT_LEN")
        assert ids.dtype == lengths.dtype == np.uint32 and lengths.tolist() == [[ids.shape[-1]]]
        return ids

    def postprocess(self, tokens: np.ndarray, num_shown: int) -> str:
        inputs = {
            "TOKENS_BATCH": tokens,
            "sequence_length": np.array([[num_shown]], np.uint32),
            "skip_special_tokens": np.ones((1, 1), np.int32),
        }
        with grpcclient.InferenceServerClient(self._url) as client:
            result = client.infer("postprocessing", [to_input(*item) for item in inputs.items()])
        return result.as_numpy("OUTPUT")[0].decode()

    def stream(self, prompt: str, max_tokens: int, start: bool = False, end: bool = False) -> Iterator[Piece]:
        """A turn. Raises InferenceServerException for an error response."""
        ids = self._prompt_ids(prompt, start)
        if end and max_tokens == 0:
            ids = np.array([[1]], np.uint32)
        if start:
            self.sequence_length, self.history = 0, []
        before = self.sequence_length + ids.shape[-1]
        shown = np.zeros((1, 1, 0), np.uint32)
        for result in self.infer(ids, max_tokens, START=start, END=end, step=self.sequence_length):
            length = int(result.as_numpy("sequence_length").squeeze())
            output = result.as_numpy("output_ids")
            assert output.dtype == result.as_numpy("sequence_length").dtype == np.uint32
            output = output.reshape(1, 1, output.shape[-1])[:, :, before:length]
            if output.size and output[-1, -1, -1] == self.eos_id:
                length, output = length - 1, output[:, :, :-1]
            text = self.postprocess(output, shown.shape[-1]) if output.size else ""
            shown = output
            final = result.get_response().parameters["triton_final_response"].bool_param
            yield Piece(text, output.reshape(-1).tolist(), final)
        self.sequence_length = length
        self.history += [*ids[0].tolist(), *shown.reshape(-1).tolist()]

    def say(self, prompt: str, max_tokens: int, **flags: bool) -> list[Piece]:
        return list(self.stream(prompt, max_tokens, **flags))

    def end(self) -> None:
        list(self.stream("", 0, end=True))

    def stop(self, end: bool = False) -> None:
        ids = self._prompt_ids("", start=False)
        list(self.infer(ids, 0, START=False, END=end, STOP=True, step=self.sequence_length))

    def _prompt_ids(self, prompt: str, start: bool) -> np.ndarray:
        ids = self.preprocess(prompt)
        return ids[:, 1:] if not start and ids[0][0] == self.bos_id else ids

    def resume(self) -> None:
        """Begin the session anew with the whole history, and generate nothing."""
        for result in self.infer(np.array([self.history], np.uint32), 0, START=True, END=False, step=0):
            self.sequence_length = int(result.as_numpy("sequence_length").squeeze())

    def infer(self, ids: np.ndarray, max_tokens: int, **inputs: Any) -> Iterator[grpcclient.InferResult]:
        values = {"STOP": 0, "CORRID": self._session_id, "session_len": self._session_len, **self._sampling, **inputs}
        values["request_output_len"] = max_tokens
        tensors = [to_input("input_ids", ids), to_input("input_lengths", np.array([[ids.shape[-1]]], np.uint32))]
        tensors += [to_input(name, np.array([[value]], TYPES[name])) for name, value in values.items()]
        if self._stop_ids:
            rows = [self._stop_ids, range(1, len(self._stop_ids) + 1)]
            tensors.append(to_input("stop_words_list", np.array([rows], np.int32)))
        send = partial(self._produce, tensors, bool(inputs.get("START")), bool(inputs.get("END")))
        return _responses(send)

    def _produce(
        self, tensors: list[grpcclient.InferInput], start: bool, end: bool, put: Callable[[Any, Any], None]
    ) -> None:
        """One stream for each request: leaving its context waits for the end."""
        with grpcclient.InferenceServerClient(self._url) as client:
            client.start_stream(lambda result, error: put(result, error))
            client.async_stream_infer(
                "turbomind",
                tensors,
                sequence_id=self._session_id,
                request_id=str(self._session_id),
                sequence_start=start,
                sequence_end=end,
            )


def _responses(produce: Callable[[Callable[[Any, Any], None]], None]) -> Iterator[grpcclient.InferResult]:
    """What a producer in a thread of its own has put. Raises the first error among it."""
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        try:
            produce(lambda result, error: answers.put((result, error)))
        finally:
            answers.put((None, None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while True:
        result, error = answers.get(timeout=120)
        if error is not None:
            raise error
        if result is None:
            thread.join()
            return
        yield result
