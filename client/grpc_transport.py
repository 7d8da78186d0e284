"""Requests over gRPC: ModelStreamInfer, one stream per request.

Cancelling a stream cancels every request on it, so none is ever shared. A deadline is always set, because a stream
whose server-side process died says nothing more. The stub is used directly rather than through tritonclient's callback
thread: iterating the call delivers the chunks in order, in the caller's thread, and its cancel() is the cancellation.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from client.errors import ClientError, code_in, no_entry, no_grpc, no_server
from client.messages import GenerateRequest, TextChunk

_PACK = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}
_UNPACK = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}
# What grpc says of a server that answers in HTTP/1, and of one that hangs up in the handshake, as Triton's HTTP port does.
_NO_GRPC = re.compile("Failed parsing HTTP/2|http1.x server|failed to connect.*(Socket closed|Connection reset)")
_BROKEN = ("Socket closed", "Stream removed", "Connection reset", "GOAWAY")
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


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


def encode_request(request: GenerateRequest, model: str, request_id: str, timeout_s: float) -> Any:
    """The ModelInferRequest, rank-2 tensors throughout; the server is told the deadline and the namespace as well."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, parameter in request.parameters(timeout_s).items():
        setattr(message.parameters[key], "string_param" if isinstance(parameter, str) else "int64_param", parameter)
    for name, (datatype, values) in request.tensors().items():
        tensor = message.inputs.add()
        tensor.name, tensor.datatype = name, datatype
        tensor.shape.extend([1, len(values)])
        message.raw_input_contents.append(encode_values(datatype, values))
    return message


def decode_response(message: Any) -> TextChunk:
    """A TextChunk from one ModelInferResponse; `final` as the server flags it."""
    final = (
        message.parameters["triton_final_response"].bool_param
        if "triton_final_response" in message.parameters
        else False
    )
    outputs = {
        output.name: decode_values(output.datatype, raw)
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    return TextChunk.from_outputs(outputs, final)


class GrpcTransport:
    """A channel to one server. Any thread; every request opens a stream of its own on it."""

    def __init__(self, url: str, model: str, api_key: str = "") -> None:
        """`api_key`: sent as metadata `authorization: Bearer KEY` with every stream, unless it is empty."""
        self.url = url
        self._model = model
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._channel = grpc.insecure_channel(url, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, request: GenerateRequest, timeout_s: float, request_id: str) -> Generator[TextChunk, None, None]:
        """Yield chunks until the final one. Leaving the iteration early cancels the request. Raises ClientError."""
        message = encode_request(request, self._model, request_id, timeout_s)
        # The metadata `triton_grpc_error` is left out, because an error with it may end tritonserver 24.10. The text of an
        # error names its status anyway.
        call = self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=self._metadata)
        try:
            for answer in call:
                if answer.error_message:
                    raise ClientError(answer.error_message, code_in(answer.error_message))
                chunk = decode_response(answer.infer_response)
                yield chunk
                if chunk.final:
                    return
            raise ClientError("the server ended the stream without a final response", "UNAVAILABLE")
        except grpc.RpcError as error:
            raise self._client_error(error, timeout_s) from None
        finally:
            call.cancel()  # Nothing happens when the stream is over already.

    def close(self) -> None:
        self._channel.close()

    def _client_error(self, error: grpc.RpcError, timeout_s: float) -> ClientError:
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return ClientError(f"no final answer from {self.url} within {timeout_s:g} s", code.name)
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return no_entry(self.url, has_key=bool(self._metadata))
        if code == grpc.StatusCode.UNAVAILABLE and _NO_GRPC.search(details):
            return no_grpc(self.url)
        if code == grpc.StatusCode.UNAVAILABLE and ("connect" in details.lower() or "resolv" in details.lower()):
            return no_server(self.url)
        if any(sign in details for sign in _BROKEN):
            message = f"the connection to {self.url} broke: the server was stopped or started again ({details})"
            return ClientError(message, "UNAVAILABLE")
        return ClientError(details or f"the server answered {code.name}", code.name)
