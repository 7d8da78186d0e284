"""The gRPC transport against a small server of the same interface, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.client import EverbatchClient
from client.errors import ClientError
from client.retry import NEVER


class Refusing(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with an error text, as Triton does on a stream, and keeps the metadata of each call."""

    def __init__(self) -> None:
        self.message = ""
        self.metadata: list[dict[str, str]] = []

    def ModelStreamInfer(
        self, requests: Iterator[service_pb2.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[service_pb2.ModelStreamInferResponse]:
        self.metadata.append({key: value for key, value in context.invocation_metadata()})
        next(requests)
        yield service_pb2.ModelStreamInferResponse(error_message=self.message)


@pytest.fixture
def refusing() -> Iterator[tuple[Refusing, str]]:
    servicer = Refusing()
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("message", "code"), [("[UNAVAILABLE] queue full", "UNAVAILABLE"), ("unknown model", "UNKNOWN")]
)
def test_an_error_has_the_code_that_its_text_names(refusing: tuple[Refusing, str], message: str, code: str) -> None:
    servicer, url = refusing
    servicer.message = message
    with EverbatchClient(url, retry=NEVER) as client, pytest.raises(ClientError) as caught:
        client.generate("a", timeout_s=20)
    assert (caught.value.code, str(caught.value)) == (code, message)


def test_no_metadata_is_sent_that_tritonserver_does_not_survive(refusing: tuple[Refusing, str]) -> None:
    servicer, url = refusing
    with EverbatchClient(url, retry=NEVER) as client, pytest.raises(ClientError):
        client.generate("a", timeout_s=20)
    assert "triton_grpc_error" not in servicer.metadata[0]
