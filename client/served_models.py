"""What a server has, asked once a request has failed: is its model there, and does it take what this client sends?"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any

from client.errors import ClientError
from client.http_messages import request_headers
from client.http_transport import open_connection
from client.messages import GenerateRequest
from client.settings import Settings

LOOK_S = 5.0  # for each question
MAX_MODELS = 50  # that are looked at
OTHER_SERVER = "start the server with --profile trtllm, alone or beside others (--profile trtllm,vllm)"
_PERHAPS_THE_MODEL = ("NOT_FOUND", "INVALID_ARGUMENT", "UNKNOWN")
Inputs = dict[str, str]  # name -> datatype


def explained(error: ClientError, settings: Settings) -> str:
    """The text of a request's error. Where its model is the reason, what the server has instead: it is asked for that."""
    served = served_models(settings) if error.code in _PERHAPS_THE_MODEL else None
    if served is None:
        return f"{error}{_guess(error, settings)}"
    asked = served.get(settings.model)
    if asked is None:
        missing = f"there is no model {settings.model!r} at {settings.address.url}"
        return f"{missing}; {_instead(served, settings)}" if _names_no_model(error) else str(error)
    if _fits(asked, settings):
        return str(error)
    if asked.keys() >= _sent().keys():
        return f"the model {settings.model!r} has inputs of older types; speak HTTP to it, with url=http://HOST:PORT"
    return f"the model {settings.model!r} takes other inputs than this client sends; {_instead(served, settings)}"


def served_models(settings: Settings) -> dict[str, Inputs] | None:
    """The inputs of each model that is loaded, by its name. None where the server does not tell."""
    ask = _over_grpc if settings.address.protocol == "grpc" else _over_http
    return ask(settings)


def _guess(error: ClientError, settings: Settings) -> str:
    """The remedy where the server does not tell what it has; empty where the error says enough."""
    if _names_no_model(error):
        return f"; name a model that the server has with model=NAME, or {OTHER_SERVER}"
    if error.code == "NOT_FOUND" and settings.address.protocol == "http":
        return "; if this is the OpenAI endpoint, name the port of Triton (8000 by default) with url=http://HOST:PORT"
    return ""


def _names_no_model(error: ClientError) -> bool:
    return error.code == "NOT_FOUND" and "unknown model" in str(error)


def _instead(served: dict[str, Inputs], settings: Settings) -> str:
    fitting = [name for name, inputs in served.items() if _fits(inputs, settings)]
    there = f"the server has {', '.join(served) or 'none'}"
    if fitting:
        return f"{there}, of which this client can ask {', '.join(fitting)}: name one with model=NAME"
    return f"{there}, of which this client can ask none: {OTHER_SERVER}"


def _fits(inputs: Inputs, settings: Settings) -> bool:
    """True if a model takes a request of this client. Over HTTP the server makes the tensors, of the types it needs."""
    if settings.address.protocol == "http":
        return inputs.keys() >= _sent().keys()
    return inputs.items() >= _sent().items()


def _sent() -> Inputs:
    """The inputs that every request of this client has."""
    return {name: datatype for name, (datatype, _) in GenerateRequest("").tensors().items()}


def _over_grpc(settings: Settings) -> dict[str, Inputs] | None:
    import grpc  # type: ignore[import-untyped]  # It takes a while, and is loaded already where gRPC is spoken.
    from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

    from client.grpc_transport import open_channel

    with open_channel(settings) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        options: dict[str, Any] = {"timeout": LOOK_S, "metadata": settings.metadata}
        try:
            loaded = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(), **options).model_stats
            found = {}
            for name in sorted({model.name for model in loaded})[:MAX_MODELS]:
                model = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name), **options)
                found[name] = {tensor.name: tensor.datatype for tensor in model.inputs}
        except grpc.RpcError:
            return None
    return found


def _over_http(settings: Settings) -> dict[str, Inputs] | None:
    try:
        loaded = _get(settings, "/v2/models/stats")["model_stats"]
        found = {}
        for name in sorted({model["name"] for model in loaded})[:MAX_MODELS]:
            model = _get(settings, f"/v2/models/{urllib.parse.quote(name, safe='')}")
            found[name] = {tensor["name"]: tensor["datatype"] for tensor in model["inputs"]}
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None  # No answer, or one of something else than Triton.
    return found


def _get(settings: Settings, path: str) -> Any:
    """The JSON of a GET. Raises OSError, HTTPException and ValueError."""
    connection = open_connection(settings, LOOK_S)
    try:
        connection.request("GET", path, headers=request_headers(settings.api_key))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()
