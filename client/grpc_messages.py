"""Requests and answers as messages of gRPC, and what its errors mean. Both transports over gRPC use it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from client.address import Address
from client.errors import (
    Cancelled,
    ClientError,
    Unavailable,
    client_error,
    no_entry,
    no_grpc,
    no_server,
    no_tls,
    no_trust,
    too_late,
)
from client.messages import GenerateRequest, TextChunk

_PACK = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}
_UNPACK = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}
# Error texts of grpc for a server that answers in HTTP/1, or hangs up during the handshake as Triton's HTTP port does.
_NO_GRPC = re.compile("Failed parsing HTTP/2|http1.x server|failed to connect.*(Socket closed|Connection reset)")
_NO_TLS = re.compile("WRONG_VERSION_NUMBER|Ssl handshake failed|HANDSHAKE_FAILURE|TSI_")
_BROKEN = ("Socket closed", "Stream removed", "Connection reset", "GOAWAY")
Tensor = tuple[str, list[Any]]  # Triton's name of a type, and a value for each row
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def encode_values(datatype: str, values: list[Any]) -> bytes:
    """Raw contents of a tensor; a string is its UTF-8 bytes after a 4-byte length."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(data)) + data for data in (value.encode() for value in values))
    return b"".join(struct.pack(_PACK[datatype], value) for value in values)


def decode_values(datatype: str, raw: bytes) -> list[Any]:
    """The inverse of encode_values, for every datatype the text models answer with. Raises ClientError for others."""
    if datatype == "BYTES":
        return list(_strings(raw))
    if datatype not in _UNPACK:
        raise ClientError(
            f"an output has datatype {datatype}, which this client does not read; use tritonclient for it"
        )
    code = _UNPACK[datatype]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def _strings(raw: bytes) -> Iterator[str]:
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4
        yield raw[position : position + length].decode(errors="replace")
        position += length


def encode_infer(model: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, str | int]) -> Any:
    """The ModelInferRequest of tensors [rows, 1]."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for key, parameter in parameters.items():
        setattr(message.parameters[key], "string_param" if isinstance(parameter, str) else "int64_param", parameter)
    for name, (datatype, values) in tensors.items():
        tensor = message.inputs.add()
        tensor.name, tensor.datatype = name, datatype
        tensor.shape.extend([len(values), 1])
        message.raw_input_contents.append(encode_values(datatype, values))
    return message


def encode_command(request: dict[str, Any], model: str) -> Any:
    """The ModelInferRequest of a JSON object for a model of the kind of `everbatch`."""
    message = service_pb2.ModelInferRequest(model_name=model)
    tensor = message.inputs.add()
    tensor.name, tensor.datatype = "request", "BYTES"
    tensor.shape.extend([1])
    message.raw_input_contents.append(encode_values("BYTES", [json.dumps(request)]))
    return message


def read_command_answer(answer: Any) -> dict[str, Any]:
    """The JSON object of a ModelStreamInferResponse. Raises ClientError."""
    if answer.error_message:
        raise client_error(answer.error_message)
    (text,) = decode_outputs(answer.infer_response)["response"]
    value: dict[str, Any] = json.loads(text)
    return value


def decode_outputs(message: Any) -> dict[str, list[Any]]:
    """The outputs of a ModelInferResponse, by name. Raises ClientError."""
    return {
        output.name: decode_values(output.datatype, raw)
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }


def encode_request(request: GenerateRequest, model: str, request_id: str, timeout_s: float) -> Any:
    """The ModelInferRequest, rank-2 tensors but for that of images, with the deadline and the namespace as parameters."""
    message = service_pb2.ModelInferRequest(model_name=request.model(model), id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, parameter in request.parameters(timeout_s).items():
        setattr(message.parameters[key], "string_param" if isinstance(parameter, str) else "int64_param", parameter)
    for name, (datatype, values) in request.tensors().items():
        tensor = message.inputs.add()
        tensor.name, tensor.datatype = name, datatype
        tensor.shape.extend(request.shape(len(values)))
        message.raw_input_contents.append(encode_values(datatype, values))
    return message


def decode_response(message: Any) -> TextChunk:
    """A TextChunk from one ModelInferResponse; `final` as the server flags it."""
    final = (
        message.parameters["triton_final_response"].bool_param
        if "triton_final_response" in message.parameters
        else False
    )
    return TextChunk.from_outputs(decode_outputs(message), final)


def read_answer(answer: Any) -> TextChunk:
    """The chunk of a ModelStreamInferResponse. Raises ClientError for one that is an error."""
    if answer.error_message:
        raise client_error(answer.error_message)
    return decode_response(answer.infer_response)


def rpc_failure(error: grpc.RpcError, address: Address, timeout_s: float, *, has_key: bool) -> ClientError:
    """The ClientError for a failed call, with a sentence for a person."""
    code, details = error.code(), error.details() or ""
    url = address.url
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return too_late(url, timeout_s)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return no_entry(url, has_key=has_key)
    if code == grpc.StatusCode.UNAVAILABLE and (unreachable := _unreachable(details, address)) is not None:
        return unreachable
    if any(sign in details for sign in _BROKEN):
        return Unavailable(f"the connection to {url} broke: the server was stopped or started again")
    if code == grpc.StatusCode.CANCELLED:
        return Cancelled(f"the request to {url} was cancelled")
    return client_error(details or f"the server answered {code.name}", code.name)


def _unreachable(details: str, address: Address) -> ClientError | None:
    if "CERTIFICATE_VERIFY_FAILED" in details or "Peer name" in details:
        return no_trust(address.url)
    if address.tls and _NO_TLS.search(details):
        return no_tls(address.url)
    if _NO_GRPC.search(details):
        return no_grpc(address.url)
    if "connect" in details.lower() or "resolv" in details.lower():
        return no_server(address.url)
    return None
