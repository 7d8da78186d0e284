"""`python -m gateway`: serves the OpenAI-compatible endpoint until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from gateway.browsers import fault_of
from gateway.detected import REASONING_FORMATS, TOOL_FORMATS
from gateway.keys import FORM, KeysError
from gateway.log_lines import set_up_logging
from gateway.served import served_of
from gateway.server import GatewayServer
from gateway.settings import Settings

SWITCH_INTERVAL_S = 0.001  # so long the event loop waits for the thread that reads large bodies; Python's own is 0.005
_DEFAULTS = Settings()


def parser() -> argparse.ArgumentParser:
    """Every flag names a field of Settings."""
    flags = argparse.ArgumentParser(
        prog="python -m gateway", description="An OpenAI-compatible endpoint before Triton."
    )
    add = flags.add_argument
    add("--triton", default=_DEFAULTS.triton, metavar="HOST:PORT", help="Triton's gRPC address")
    add("--triton-model", default=_DEFAULTS.triton_model, metavar="NAME", help="the Triton model to ask")
    add(
        *("--model-name", "--model-names"),
        dest="model_names",
        action="append",
        metavar="NAME",
        help="a name clients may use as `model`; may be given several times",
    )
    add(
        "--lora",
        dest="adapters",
        action="append",
        metavar="NAME",
        help="a LoRA adapter of the server that clients may name as `model`; may be given several times",
    )
    add(
        "--other-model",
        dest="others",
        action="append",
        type=served_of,
        metavar="JSON",
        help="a further model of the server: triton_model, names, adapters, label (gateway/served.py)",
    )
    add("--metrics-label", default="", metavar="NAME", help="what the metrics of the first model's engine call it")
    add("--control", type=Path, metavar="SOCKET", help="the launcher's, for operations on models")
    add(
        "--prompt-adapter",
        dest="prompt_adapters",
        action="append",
        metavar="NAME",
        help="a prompt adapter of the server, likewise",
    )
    add(
        "--tool-format",
        default=_DEFAULTS.tool_format,
        choices=TOOL_FORMATS,
        help="how the model writes tool calls",
    )
    add(
        "--reasoning-format",
        default=_DEFAULTS.reasoning_format,
        choices=REASONING_FORMATS,
        help="how the model marks its reasoning; none: that is part of the content",
    )
    add("--host", default=_DEFAULTS.host, help="address to listen at")
    add("--port", type=int, default=_DEFAULTS.port, help="0: any free port, which is printed")
    add("--api-keys", type=Path, metavar="FILE", help=f"lines of {FORM}; mode 0600")
    add(
        "--allow-origin",
        dest="allow_origins",
        action="append",
        metavar="ORIGIN",
        help="of web pages that may use the endpoint, such as https://chat.example; may be given several times",
    )
    add(
        "--allow-host",
        dest="allow_hosts",
        action="append",
        metavar="NAME",
        help="a further name of the server, which it answers to without keys; may be given several times",
    )
    add("--server-version", default=_DEFAULTS.server_version, metavar="VERSION", help="what /version tells")
    add("--metrics-url", metavar="URL", help="Triton's metrics page, passed on at /metrics")
    for name, kind, help_text in (
        ("max-body-bytes", int, "of one request"),
        ("body-timeout-s", float, "for a body to arrive"),
        ("request-timeout-s", float, "for a reply to be complete"),
        ("resume-timeout-s", float, "for a server that has ended to be back, until a reply is given up; 0: at once"),
        ("max-requests", int, "POST requests at once; more get 429"),
        ("max-choices", int, "replies at once; more get 429"),
        ("max-choices-per-request", int, "prompts times n, or best_of, of one request"),
        ("shutdown-grace-s", float, "replies may run on so long after SIGTERM"),
        ("store-count", int, "responses kept for previous_response_id, for each namespace"),
        ("store-bytes", int, "of memory that they take"),
        ("store-ttl-s", float, "since a response was last used"),
    ):
        add(f"--{name}", type=kind, default=getattr(_DEFAULTS, name.replace("-", "_")), metavar="N", help=help_text)
    return flags


def settings_of(arguments: list[str]) -> Settings:
    flags = parser()
    values = vars(flags.parse_args(arguments))
    values["model_names"] = tuple(values["model_names"] or _DEFAULTS.model_names)
    values["adapters"] = tuple(values["adapters"] or ())
    values["others"] = tuple(values["others"] or ())
    for key in ("prompt_adapters", "allow_origins", "allow_hosts"):
        values[key] = tuple(values[key] or ())
    if (fault := fault_of(values["allow_origins"], values["allow_hosts"], values["api_keys"] is not None)) is not None:
        flags.error(fault)
    for kind, key in (("LoRA", "adapters"), ("prompt", "prompt_adapters")):
        if same := set(values["model_names"]) & set(values[key]):
            flags.error(f"{min(same)} is the name of a model and of a {kind} adapter; give one of them another name")
    return Settings(**values)


def main(arguments: list[str]) -> int:
    set_up_logging()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        settings = settings_of(arguments)
        server = GatewayServer(settings)
    except KeysError as error:
        print(f"gateway: --api-keys {settings.api_keys}: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # raised once more when the server has ended
    try:
        server.run()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
