"""Settings of the gateway, fixed when it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from gateway.served import Served

MIB = 1 << 20


def is_loopback(host: str) -> bool:
    """True if only local programs reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Settings:
    """Times are in seconds, sizes in bytes."""

    triton: str = "127.0.0.1:8001"  # HOST:PORT of Triton's gRPC
    triton_model: str = "everbatch"
    model_names: tuple[str, ...] = ("everbatch",)  # values of `model` that clients may send, in the order of /v1/models
    adapters: tuple[
        str, ...
    ] = ()  # names of LoRA adapters: clients may name one as `model`, to have it on the first model
    others: tuple[Served, ...] = ()  # further models of the server, behind the one that `triton_model` is
    metrics_label: str = ""  # the label `model` of that one's engine in metrics; empty: there is one engine
    control: Path | None = None  # the launcher's socket for operations on models; None: the server has one model
    prompt_adapters: tuple[str, ...] = ()  # names of prompt adapters, which clients may name as `model`
    host: str = "127.0.0.1"
    port: int = 9000  # 0: any free one
    tool_format: str = "hermes"  # how the model writes tool calls: a name of tool_formats/table.py
    reasoning_format: str = "none"  # how it marks its reasoning: a name of reasoning.py; none: that is not told apart
    api_keys: Path | None = None  # None: no key is needed
    allow_origins: tuple[str, ...] = ()  # origins of the web pages that may use the endpoint; *: any
    allow_hosts: tuple[str, ...] = ()  # further names of the server, which it answers to without keys
    server_version: str = "unknown"  # as /version and the routes for routers tell it
    metrics_url: str | None = None  # Triton's metrics page; None: only the gateway's own counters are served
    max_body_bytes: int = 4 * MIB
    max_image_body_bytes: int = 32 * MIB  # the same where a model takes images, and all images of one request together
    max_image_bytes: int = 20 * MIB  # one image
    max_images: int = 16  # in one request, those of earlier turns included; the engine's own default, too
    allow_image_hosts: tuple[str, ...] = ()  # from which images are fetched: HOST, HOST:PORT, *.HOST
    image_timeout_s: float = 10.0  # for all images of a request to be fetched
    body_timeout_s: float = 30.0  # for the whole body to arrive
    request_timeout_s: float = 600.0  # for the whole reply
    resume_timeout_s: float = 120.0  # a reply whose server ends waits so long for the next one; 0: it gets an error
    max_requests: int = 256  # POST requests at once
    max_choices: int = 512  # replies (choices) that are generated at once, of all requests together
    max_choices_per_request: int = 128  # prompts times n, or best_of, of one request
    shutdown_grace_s: float = 5.0  # replies may run on so long after SIGTERM
    batches: Path | None = None  # directory of files and batches (gateway/batches); None: there are none
    max_file_bytes: int = 100 * MIB
    files_count: int = 1000  # files, and as many batches, of each namespace
    files_bytes: int = 1 << 30  # the bytes that a namespace may have in files
    store_count: int = 1000  # responses kept for previous_response_id, for each namespace
    store_bytes: int = 64 * MIB  # memory that they take, for each namespace
    store_ttl_s: float = 24 * 3600.0  # since a response was last used
