"""What an honest client asks of every front and of the OpenAI endpoint, and the answer in a form that can be compared."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.hostile import grpc_messages, served
from tests.hostile.target import Target

PROMPT, TOKENS = "def main(", 12
FIRST_TURN, SECOND_TURN = "import os", "import sys"
_TIMEOUT_S = 60.0
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_sessions = itertools.count(1 << 40)  # ids that no hostile request uses

QUESTIONS = (*served.FRONTS, "session", "chat", "completion", "response")


def ask(target: Target, question: str) -> str:
    """The answer to one of QUESTIONS, always the same on a server that is well. Raises RuntimeError for an error."""
    if question == "session":
        return "\n".join(_session(target))
    if question in served.FRONTS:
        return _front(target, question)
    return _gateway(target, question)


def _front(target: Target, model: str) -> str:
    """All outputs of all responses over gRPC, bit for bit."""
    message = grpc_messages.base(model)
    for tensor in served.good(model, TOKENS, PROMPT):
        grpc_messages.put(message, model, tensor)
    with grpc.insecure_channel(target.server.grpc_url) as channel:
        stream = channel.stream_stream(
            _STREAM,
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        responses = list(stream(iter([message]), timeout=_TIMEOUT_S))
    if errors := [response.error_message for response in responses if response.error_message]:
        raise RuntimeError(f"{model} answered {errors}")
    ends = sum(response.infer_response.parameters["triton_final_response"].bool_param for response in responses)
    if ends != 1:
        raise RuntimeError(f"{model} told {ends} ends")
    return " ".join(_outputs(response.infer_response) for response in responses)


def _outputs(response: Any) -> str:
    """Shapes and contents; of the JSON of the front `everbatch` what others' KV in the cache does not change."""
    shown = []
    for tensor, raw in zip(response.outputs, response.raw_output_contents):
        content = repr(raw)
        if tensor.name == "response":
            content = repr({**json.loads(raw[4:]), "usage": None}) if raw[4:5] == b"{" else content
        shown.append(f"{tensor.name}{list(tensor.shape)}={content}")
    return " ".join(shown)


def _session(target: Target) -> list[str]:
    turn = {"CORRID": next(_sessions), "max_tokens": 6}
    first = {**turn, "text_input": FIRST_TURN, "START": 1, "END": 0}
    second = {**turn, "text_input": SECOND_TURN, "START": 0, "END": 1}
    url = f"{target.server.http_url}/v2/models/ensemble/generate"
    return [str(_posted(url, fields)["text_output"]) for fields in (first, second)]


def _gateway(target: Target, question: str) -> str:
    fields = {"model": "everbatch", "temperature": 0}
    if question == "chat":
        fields |= {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
        return str(_posted(f"{target.gateway_url}/v1/chat/completions", fields)["choices"])
    if question == "completion":
        fields |= {"prompt": PROMPT, "max_tokens": TOKENS, "n": 2}
        return str(_posted(f"{target.gateway_url}/v1/completions", fields)["choices"])
    fields |= {"input": PROMPT, "max_output_tokens": TOKENS}
    first = _posted(f"{target.gateway_url}/v1/responses", fields)
    again = {**fields, "input": SECOND_TURN, "previous_response_id": first["id"]}
    second = _posted(f"{target.gateway_url}/v1/responses", again)
    request = urllib.request.Request(f"{target.gateway_url}/v1/responses/{first['id']}", method="DELETE")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        response.read()
    return str([body["output"][0]["content"][0]["text"] for body in (first, second)])


def _posted(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(fields).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"status {error.code}: {error.read().decode()[:200]}") from None
