"""Errors to clients: a status and {"error": {message, type, param, code}}; `anthropic_refusal` is for Anthropic's clients."""

from __future__ import annotations

import re
from typing import Any

from backend.api.sampling import PLAIN
from gateway.origin import GuideOrigin

RETRY_OVERLOAD_S = 1
RETRY_UNAVAILABLE_S = 2

THREAD_NOT_FOUND = "thread_not_found"  # by which Anthropic's client knows that it has to send the whole conversation
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 504: "timeout_error", 529: "overloaded_error"}
_STATUS_OF_CODE = {
    "INVALID_ARGUMENT": 400,
    "UNSUPPORTED": 400,
    "OUT_OF_RANGE": 400,
    "FAILED_PRECONDITION": 400,
    "ALREADY_EXISTS": 400,
    "NOT_FOUND": 404,
    "DEADLINE_EXCEEDED": 408,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "CANCELLED": 503,
}
_OVERLOAD = re.compile(r"queue|max_queue_size|overload|too many", re.IGNORECASE)
_GUIDE = re.compile(r"guide((?:\.\w+|\[\d+\])*): ")  # the model's errors about a guide begin with the place in it
_NO_GUIDES = "GuidedDecoder"  # the first word where no guide is taken at all
_DEAD_STUB = re.compile(r"Stub process '.*' is not healthy")  # Triton's words until the launcher has started it again
_CODED = re.compile(r"\[([A-Z_]+)\] ?(.*)", re.DOTALL)
# keys of the Triton model that clients know, and what OpenAI calls those that have another name there
_SAME_NAME = (
    *(field.name for field in PLAIN),
    *("messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words"),
    *(
        "logit_bias",
        "logprobs",
        "echo",
        "stream",
        "skip_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
    ),
)
_PARAMETERS = {name: name for name in _SAME_NAME} | {
    "images": "messages",
    "fill": "suffix",
    "prompt_token_ids": "prompt",
    "lora_name": "model",
    "prompt_adapter_name": "model",
    "LoRA": "model",
    "num_return_sequences": "n",
    "beam_width": "n",
    "include_stop_in_output": "include_stop_str_in_output",
    "prompt_logprobs": "logprobs",
    "prompt_log_probs": "logprobs",
    "dimensions": "dimensions",
    "documents": "documents",
    "query": "query",
    "embeddings": "model",
}


class GatewayError(Exception):
    """A request is refused or failed. `retry_after`: seconds after which another try makes sense.

    `logged` says in the log which parameter it was, where `param` is not of the gateway's own words but of a client's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.logged = param if logged is None else logged
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer, and of an error event in a stream."""
        return {"error": {"message": self.message, "type": self.kind(), "param": self.param, "code": self.code}}

    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error")


class ConnectionLost(GatewayError):
    """The server has ended, or its connection broke. `was_taken`: it may have had the request by then."""

    def __init__(self, message: str, was_taken: bool = True) -> None:
        super().__init__(503, message, code="service_unavailable", retry_after=RETRY_UNAVAILABLE_S)
        self.was_taken = was_taken


class ServerLost(GatewayError):
    """The server has ended again and again while this request ran, so it may be the cause."""

    def __init__(self, times: int) -> None:
        text = f"the server has ended {times} times while this request ran; it is not sent again"
        super().__init__(503, text, code="service_unavailable", retry_after=RETRY_UNAVAILABLE_S)


class Overloaded(GatewayError):
    """The server is at its limit for all clients together."""


def overloaded(message: str) -> GatewayError:
    return Overloaded(429, message, code="rate_limit_exceeded", retry_after=RETRY_OVERLOAD_S)


def too_many_of_one(message: str) -> GatewayError:
    """One client has its share."""
    return GatewayError(429, message, code="rate_limit_exceeded", retry_after=RETRY_OVERLOAD_S)


def unavailable(message: str) -> GatewayError:
    return GatewayError(503, message, code="service_unavailable", retry_after=RETRY_UNAVAILABLE_S)


def anthropic_refusal(error: GatewayError, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error as Anthropic's API has them."""
    status = 529 if isinstance(error, Overloaded) else 504 if error.status == 408 else error.status
    shown: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": error.message}
    if error.code == THREAD_NOT_FOUND:
        shown["details"] = {"error_code": error.code}
    return status, {"type": "error", "error": shown, "request_id": request_id}


def failed(request_id: str) -> GatewayError:
    """For what must not happen."""
    text = f"the gateway failed at this request; its log says where, under {request_id}"
    return GatewayError(500, text, code="internal_error")


def from_triton(text: str, origin: GuideOrigin | None = None) -> GatewayError:
    """The error that Triton answered with, by the code its text begins with. A text without one is not passed on.

    `origin`: what the guide of the request was made of.
    """
    found = _CODED.match(text)
    if _DEAD_STUB.search(text):
        return ConnectionLost("the model's process has ended; try again when /health answers 200")
    if found is None:
        if "unknown model" in text or "is not ready" in text or "unavailable" in text:
            return unavailable("the model is not loaded; try again when /health answers 200")
        return GatewayError(500, "the server failed at this request; its log says why", code="internal_error")
    code, message = found.groups()
    status = _STATUS_OF_CODE.get(code, 500)
    if status == 429 or (status == 503 and _OVERLOAD.search(message)):
        return overloaded(message)
    if status == 503:
        return unavailable(message)
    if origin is not None and (place := _GUIDE.match(message)):
        field = origin.field_at(place[1])
        return GatewayError(status, f"{field}: {message[place.end() :]}", field, origin.code)
    first_word = re.split(r"\W", message, maxsplit=1)[0]
    if origin is not None and first_word == _NO_GUIDES:
        return GatewayError(status, message, origin.field, "unsupported_parameter")
    return GatewayError(status, message, _PARAMETERS.get(first_word), _openai_code(status, message))


def _openai_code(status: int, message: str) -> str | None:
    if status == 400 and "max_seq_len" in message:
        return "context_length_exceeded"
    return "internal_error" if status == 500 else None
