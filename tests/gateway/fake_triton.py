"""Triton's gRPC with a model `everbatch` that follows the contract and says what the prompt tells it to.

The last text of the prompt chooses: "hold" says one token and then nothing until it is cancelled; "flood N" says N
tokens of 1 kB as fast as they are taken; "error TEXT" fails with TEXT; "late error TEXT" after a token; "lose N" breaks the
connection after N responses, `losses` times; "cut" ends the stream without a last response; "silent" says nothing until it is
cancelled; "junk" says a token and then what is no JSON. "noted NOTE" has that note of its guide beside WORDS.
"step S" says a token, and when it is stopped ends after the S seconds that its step still takes.
"say TEXT" says it; "linger TEXT" says it, and ends the stream some time later; "full" ends at the model's length, "stopped
by STOP" at a stop string. Anything else is answered with WORDS, n times: a stream tells of one reply in each response, else
one response has them all. While `script` holds texts, they are the next answers, whatever is asked.
"""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backend.api.sampling import PLAIN
from tests.gateway.views import view

WORDS = ["Hello", " wörld", " 🌍", "!"]
ENDS = {
    "timeout": "timeout",
    "full": "length",
    "stopped": "stop",
}  # commands that only end the reply, and its finish_reason
TOKENIZER = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
PROMPT_IDS = [11, 12, 13, 14, 15, 16, 17]
KEYS = {
    *("messages", "prompt", "prompt_token_ids", "max_tokens", "stream", "temperature", "top_p", "top_k"),
    *(field.name for field in PLAIN),
    *("seed", "presence_penalty", "frequency_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("include_stop_in_output", "ignore_eos", "bad_words", "logit_bias", "logprobs", "echo", "timeout_s"),
    *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "guide", "tools", "lora_name"),
    *("prompt_logprobs", "skip_special_tokens", "add_generation_prompt", "continue_final_message", "fill"),
    *("chat_template_kwargs", "tokenize", "load_adapter", "unload_adapter", "list_adapters", "images"),
    *("embed", "rank", "dimensions", "resume", "reasoning", "visible_tokens", "look", "tell_prompt", "tell_tokenizer"),
    *("priority", "prompt_adapter_name"),
}


@dataclass
class Seen:
    """A request as it arrived."""

    body: dict[str, Any]
    id: str
    namespace: str
    model: str = ""
    parameters: dict[str, str] = field(default_factory=dict)  # those of text
    ended: threading.Event = field(default_factory=threading.Event)
    ended_at: float = 0.0
    was_stopped: bool = False
    client_stayed: bool | None = None  # once the server has ended the stream: whether the client had not cancelled it
    was_cancelled: bool | None = None  # of "linger": while the server had not ended the stream
    words: Counter[int] = field(default_factory=Counter)  # so far, by reply

    @property
    def said(self) -> int:
        return self.words.total()

    def text(self) -> str:
        if "messages" in self.body:
            content = self.body["messages"][-1]["content"] if self.body["messages"] else ""
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            return str("".join(texts))
        found = self.body.get("prompt", self.body.get("embed"))
        return str(self.body["fill"]["prefix"] if found is None and "fill" in self.body else found or "")

    def end(self) -> None:
        self.ended_at = time.monotonic()
        self.ended.set()


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Listens at `url` within `with`."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.script: list[str] = []
        self.adapters = ["doll"]
        self.vllm_page: str | None = None  # what the engine's metrics are; None: they cannot be had
        self.list_delays_s: list[float] = []  # for which the next lists of adapters are held back, once made
        self.early_stops = 0  # stops that find no request, as when they overtake it
        self.stops = 0  # commands that end a request
        self.losses = 0  # connections that break under "lose"
        self.capabilities = ["completion", "chat", "tools", "fim"]  # that the model tells
        self.takes_images: bool | None = None  # what the model says of itself; None: nothing, as older ones
        self.live: dict[str, Any] | None = view()  # the answer to a look
        self.ready = True  # the server
        self.model_ready = True
        self.readiness_asked = 0
        self.may_answer = threading.Event()  # to questions about the server's readiness
        self.may_answer.set()
        self._server: grpc.Server | None = None
        self.url = "127.0.0.1:0"

    def __enter__(self) -> FakeTriton:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; after a stop at the same address again."""
        self._server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(self.url)}"
        self._server.start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.stop(0).wait(10)

    def last(self) -> Seen:
        return self.requests[-1]

    def wait_for(self, count: int = 1) -> list[Seen]:
        """The requests, once there are so many."""
        deadline = time.monotonic() + 10
        while len(self.requests) < count:
            assert time.monotonic() < deadline, f"{len(self.requests)} requests of {count} came"
            time.sleep(0.002)
        return self.requests

    def ServerReady(self, request: Any, context: Any) -> Any:
        self.readiness_asked += 1
        self.may_answer.wait(10)
        return service_pb2.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.model_ready and request.name == "everbatch")

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        begun: list[Seen] = []
        for message in requests:
            yield from self._serve(message, context, begun)
        for seen in begun:
            seen.client_stayed = context.is_active()

    def _serve(self, message: Any, context: Any, begun: list[Seen]) -> Iterator[Any]:
        """`begun`: the requests of the stream, to which this one is added."""
        raw = message.raw_input_contents[0]
        assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
        given = {name: value.string_param for name, value in message.parameters.items()}
        if "stop" in [tensor.name for tensor in message.inputs]:
            yield self._stopped(message.id, given.get("cache_salt", ""))
            return
        seen = Seen(json.loads(raw[4:]), message.id, given.get("cache_salt", ""), message.model_name, given)
        if "metrics" in seen.body:
            yield self._metrics(seen)
            return
        self.requests.append(seen)
        begun.append(seen)
        context.add_callback(seen.end)
        unknown = set(seen.body) - KEYS
        if unknown:
            yield error(f"[INVALID_ARGUMENT] unknown keys {sorted(unknown)}")
            return
        is_scripted = bool(self.script) and "messages" in seen.body and not seen.body.get("tokenize")
        yield from said(seen, self.script.pop(0)) if is_scripted else self._answers(seen, context)

    def _stopped(self, request_id: str, namespace: str) -> Any:
        """The newest request of this id and namespace is to end."""
        self.stops += 1
        if self.early_stops:
            self.early_stops -= 1
            return service_pb2.ModelStreamInferResponse()
        named = [seen for seen in self.requests if (seen.id, seen.namespace) == (request_id, namespace)]
        for seen in named[-1:]:
            seen.was_stopped = True
            seen.end()
        return service_pb2.ModelStreamInferResponse()

    def _metrics(self, seen: Seen) -> Any:
        if self.vllm_page is None:
            return error("[UNAVAILABLE] the engine is not ready yet")
        seen.words[0] = 0
        text = self.vllm_page.replace("NAME", seen.body["metrics"])
        return response(seen, [{**told(seen, [], "stop"), "text": text}])

    def _answers(self, seen: Seen, context: Any) -> Iterator[Any]:
        if seen.body.get("tokenize"):
            yield self._tokens(seen)
            return
        if {"load_adapter", "unload_adapter", "list_adapters", "look"} & seen.body.keys():
            yield self._obey(seen)
            return
        command, _, rest = seen.text().partition(" ")
        if command == "error":
            yield error(rest)
        elif command == "late":
            yield piece(seen, [" tick"], None)
            yield error(rest.removeprefix("error "))
        elif command == "cut":
            yield piece(seen, [" tick"], None)
        elif command in ("hold", "step"):
            yield piece(seen, [" tick"], None)
            yield from a_step(seen, context, float(rest) if command == "step" else 0.0)
        elif command == "silent":
            seen.ended.wait(30)
        elif command == "lose":
            yield from self._losing(seen, context, int(rest))
        elif command == "junk":
            yield piece(seen, [" tick"], None)
            broken = piece(seen, [" tock"], None)
            broken.infer_response.raw_output_contents[0] = b"\x04\0\0\0{MAR"
            yield broken
        elif command in ENDS:
            yield piece(seen, [" tick"], ENDS[command], stop=rest.removeprefix("by ") or None)
        elif command in ("say", "linger"):
            yield from said(seen, rest, lingers=command == "linger")
        elif command == "flood":
            yield from flood(seen, int(rest))
        elif {"embed", "rank"} & seen.body.keys():
            yield response(seen, [vector(seen)])
        else:
            yield from plain(seen)

    def _tokens(self, seen: Seen) -> Any:
        """The answer to a request that only tokenises; each image is a token."""
        tokenizer = {"tokenizer": TOKENIZER} if seen.body.get("tell_tokenizer") else {}
        seen.words[0] = 0
        ids = [*seen.body.get("prompt_token_ids", [7, 8, 9]), *range(100, 100 + len(seen.body.get("images", [])))]
        text = "its text" if seen.body.get("echo") else ""
        facts = {"max_model_len": 2048, "capabilities": self.capabilities, **tokenizer}
        if self.takes_images is not None:
            facts["takes_images"] = self.takes_images
        return response(seen, [{**told(seen, [], "length"), "text": text, "token_ids": ids, **facts}])

    def _losing(self, seen: Seen, context: Any, count: int) -> Iterator[Any]:
        """WORDS, one in a response; after `count` responses the connection breaks, as often as `losses` says."""
        number = seen.body.get("n", 1)
        had = seen.body.get("resume", [{}] * number)
        for index, one in enumerate(had):
            if one.get("token_ids"):
                seen.words[index] = len(one["token_ids"])
        left = [range(seen.words.get(index, 0), 0 if one.get("ended") else len(WORDS)) for index, one in enumerate(had)]
        turns = sorted((place, index) for index, places in enumerate(left) for place in places)
        if not seen.body.get("stream"):
            if self.losses:
                self.losses -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield response(seen, [told(seen, WORDS, "stop", index) for index in range(number)])
            return
        for sent, (place, index) in enumerate(turns):
            if self.losses and sent == count:
                self.losses -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            reason = "stop" if place == len(WORDS) - 1 else None
            value = told(seen, [WORDS[place]], reason, index)
            yield response(seen, [value if sent or "seed" in seen.body else {**value, "seed": 7}])

    def _obey(self, seen: Seen) -> Any:
        """The answer to a command."""
        if seen.body.get("look"):
            return response(seen, [{**told(seen, [], "stop"), "live": self.live}])
        loaded, unloaded = seen.body.get("load_adapter"), seen.body.get("unload_adapter")
        if loaded is not None:
            if loaded["directory"] == "missing":
                return error("[NOT_FOUND] there is no adapter in 'missing' below lora.allowed_dir; check the name")
            self.adapters.append(loaded["name"])
        elif unloaded is not None:
            if unloaded not in self.adapters:
                return error(f"[NOT_FOUND] there is no adapter {unloaded!r}")
            self.adapters.remove(unloaded)
        seen.words[0] = 0
        text = json.dumps(self.adapters) if seen.body.get("list_adapters") else ""
        if seen.body.get("list_adapters") and self.list_delays_s:
            time.sleep(self.list_delays_s.pop(0))
        return response(seen, [{**told(seen, [], "stop"), "text": text}])


def plain(seen: Seen) -> Iterator[Any]:
    """WORDS, two tokens in the second response; cut at max_tokens."""
    limit = seen.body.get("max_tokens", len(WORDS))
    words = [WORDS[i % len(WORDS)] for i in range(min(limit, len(WORDS)))]
    reason = "length" if limit < len(WORDS) else "stop"
    choices = range(seen.body.get("n", 1))
    if not seen.body.get("stream"):
        yield response(seen, [told(seen, words, reason, index) for index in choices])
        return
    groups = [group for group in (words[:1], words[1:3], words[3:]) if group] or [[]]
    for group in groups[:-1]:
        for index in choices:
            yield response(seen, [told(seen, group, None, index)])
    for index in reversed(choices):
        yield response(seen, [told(seen, groups[-1], reason, index)])


def a_step(seen: Seen, context: Any, length_s: float) -> Iterator[Any]:
    """Nothing, until the request is stopped or its stream cancelled, and then as long as a step of the model takes."""
    seen.ended.wait(30)
    time.sleep(length_s)
    seen.was_cancelled = not context.is_active()
    yield from ()


def vector(seen: Seen) -> dict[str, Any]:
    """An embedding of three numbers, the first the length of the text or ids; or a score, the length of the document."""
    seen.words[0] = 0
    if "rank" in seen.body:
        return {**told(seen, [], "length"), "score": len(seen.body["rank"]["document"]) / 100}
    data = struct.pack("<3f", len(seen.body["embed"]), 0.5, -1.0)
    return {**told(seen, [], "length"), "embedding": base64.b64encode(data).decode()}


def said(seen: Seen, text: str, lingers: bool = False) -> Iterator[Any]:
    """The text; in a stream seven characters at a time."""
    parts = [text[i : i + 7] for i in range(0, len(text), 7)] if seen.body.get("stream") else [text]
    for part in parts[:-1]:
        yield piece(seen, [part], None)
    yield piece(seen, parts[-1:], "stop")
    if lingers:
        seen.was_cancelled = seen.ended.wait(0.3)


def flood(seen: Seen, count: int) -> Iterator[Any]:
    for _ in range(count - 1):
        yield piece(seen, ["x" * 1024], None)
    yield piece(seen, ["x" * 1024], "stop")


def piece(seen: Seen, words: list[str], reason: str | None, stop: str | None = None) -> Any:
    """A response that tells of one reply. `stop`: the stop string that has ended it."""
    value = told(seen, words, reason)
    return response(seen, [value | {"stop_reason": stop} if reason is not None else value])


def told(seen: Seen, words: list[str], reason: str | None, index: int = 0) -> dict[str, Any]:
    """What is new of a reply. Of the prompt's 7 tokens 3 were there; the first reply has computed the rest for the others."""
    first = seen.words[index]
    is_first = index not in seen.words
    seen.words[index] += len(words)
    value: dict[str, Any] = {"text": "".join(words), "token_ids": list(range(first, seen.words[index]))}
    if is_first and seen.body.get("echo"):
        value["text"] = seen.text() + value["text"]
    of_prompt = seen.body.get("prompt_logprobs")
    if is_first and of_prompt is not None:
        value["prompt_logprobs"] = scored(seen.text(), of_prompt)
    if is_first and (asked := seen.body.get("tell_prompt")):
        value["prompt"] = {"prompt_tokens": 7, "cached_tokens": 6 if index else 3}
        value["prompt"] |= {"token_ids": PROMPT_IDS} if asked == "token_ids" else {}
    if is_first and not index and seen.text().startswith("noted "):
        value["guide_notes"] = [seen.text().removeprefix("noted ")]
    if seen.body.get("n", 1) > 1:
        value["index"] = index
    count = seen.body.get("logprobs")
    if count is not None:
        value["logprobs"] = [{**logprob(word, -0.5), "top": others(word, count)} for word in words]
    if reason is not None:
        prompt = 7 + len(seen.body.get("images", []))
        usage = {"prompt_tokens": prompt, "completion_tokens": seen.words[index], "cached_tokens": 6 if index else 3}
        if index == 0 and (unused := seen.body.get("best_of", 1) - seen.body.get("n", 1)) > 0:
            usage["discarded_tokens"] = 100 * unused
        value |= {"finish_reason": reason, "stop_reason": None, "usage": usage}
    return value


def scored(prompt: str, count: int) -> list[dict[str, Any]]:
    """A token that the text does not hold, then one for each character; the first one follows nothing."""
    start = {"token_id": 0, "token": "<s>", "bytes": [], "logprob": None, "top": []}
    return [start, *({**logprob(letter, -0.25), "top": others(letter, count)} for letter in prompt)]


def response(seen: Seen, values: list[dict[str, Any]]) -> Any:
    """One element for each reply that it tells of."""
    answer = service_pb2.ModelStreamInferResponse()
    message = answer.infer_response
    message.model_name, message.id = "everbatch", seen.id
    output = message.outputs.add()
    output.name, output.datatype = "response", "BYTES"
    output.shape.append(len(values))
    elements = [json.dumps(value).encode() for value in values]
    message.raw_output_contents.append(b"".join(struct.pack("<I", len(data)) + data for data in elements))
    return answer


def logprob(word: str, value: float) -> dict[str, Any]:
    return {"token_id": 1, "token": word, "bytes": list(word.encode()), "logprob": value}


def others(word: str, count: int) -> list[dict[str, Any]]:
    return [logprob(text, -0.5 - i) for i, text in enumerate([word, "a", "b", "c", "d"][:count])]


def error(text: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=text)
