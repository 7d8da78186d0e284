"""Requests to models of vLLM's wire as its samples/client.py makes them, and what their responses hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aio

from deploy.triton_server import TritonServer
from tests.e2e.wire import to_input

PROMPT = "In this example,"


def inputs_of(prompt: str = PROMPT, **inputs: Any) -> list[grpcclient.InferInput]:
    """Rank-1 tensors, without those that are None."""
    given = {name: value for name, value in {"text_input": prompt, **inputs}.items() if value is not None}
    return [
        to_input(name, np.array([value]) if isinstance(value, bool) else np.array([value.encode()], dtype=np.object_))
        for name, value in given.items()
    ]


def request(
    model: str, sampling: dict[str, Any] | None = None, *, as_tensor: bool = True, **inputs: Any
) -> dict[str, Any]:
    """As samples/client.py makes it: the sampling parameters always go as parameters too."""
    if as_tensor and sampling is not None:
        inputs["sampling_parameters"] = json.dumps(sampling)
    return {"model_name": model, "inputs": inputs_of(**inputs), "parameters": sampling}


def ask(server: TritonServer, *requests: dict[str, Any]) -> list[list[grpcclient.InferResult | Exception]]:
    """All requests at once on one stream; the responses (or the error) of each, up to its final one."""
    return asyncio.run(_ask(server.grpc_url, list(requests)))


async def _ask(url: str, requests: list[dict[str, Any]]) -> list[list[grpcclient.InferResult | Exception]]:
    """One stream for each request: an error says nothing of the request it belongs to."""
    async with aio.InferenceServerClient(url) as client:
        return list(await asyncio.gather(*(_responses(client, one) for one in requests)))


async def _responses(
    client: aio.InferenceServerClient, one: dict[str, Any]
) -> list[grpcclient.InferResult | Exception]:
    async def send() -> AsyncIterator[dict[str, Any]]:
        yield {**one, "request_id": "1"}

    return [result if error is None else error async for result, error in client.stream_infer(send())]


def text_of(responses: list[Any]) -> str:
    return "".join(value_of(response, "text_output") for response in responses)


def value_of(response: grpcclient.InferResult, name: str) -> Any:
    """The only element of an output; None when it was not sent."""
    array = response.as_numpy(name)
    if array is None:
        return None
    assert array.shape == (1,)
    return array[0].decode() if array.dtype == np.object_ else array[0].item()


def values_of(response: Any, name: str) -> list[Any]:
    """All elements of an output."""
    return [one.decode() if isinstance(one, bytes) else one for one in response.as_numpy(name).tolist()]


def is_final(response: grpcclient.InferResult) -> bool:
    return bool(response.get_response().parameters["triton_final_response"].bool_param)
