"""Flags of tritonserver that the user passes through the launcher: each is checked, because some are the launcher's own."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.errors import UserError
from deploy.invocation import RESTRICTED_APIS

_OWNED = {  # flag -> what to do instead
    "model-repository": "give --model-repository DIR or --profile NAME",
    "model-store": "give --model-repository DIR or --profile NAME",
    "backend-directory": "the launcher lays it out",
    "exit-timeout-secs": "give --exit-timeout SECONDS",
    "http-address": "give --host ADDRESS",
    "grpc-address": "give --host ADDRESS",
    "metrics-address": "give --host ADDRESS",
    "http-port": "give --http-port PORT",
    "grpc-port": "give --grpc-port PORT",
    "metrics-port": "give --metrics-port PORT",
    "allow-http": "the launcher asks the server over HTTP",
    "allow-grpc": "the launcher's clients reach the server over gRPC",
    "model-control-mode": "the launcher tells readiness by it",
    "load-model": "every model of the repositories is loaded; give those that are wanted with --model-repository DIR",
    "model-load-thread-count": "all models load at once, because those that wait for the engine must not keep its owner waiting",
    "disable-auto-complete-config": "the launcher gives it where no model needs the completion",
    "strict-model-config": "the launcher decides it by the models",
    "help": "tritonserver would print its flags and end",
    "version": "tritonserver would print its version and end",
}
_RESTRICTIONS = ("http-restricted-api", "grpc-restricted-protocol")


def check(flags: Sequence[str]) -> tuple[str, ...]:
    """`flags` as they are given to tritonserver. Raises UserError for one of the launcher's own, and for what is no flag.

    A word without dashes is the value of the flag before it.
    """
    for index, word in enumerate(flags):
        if word.startswith("--") and len(word) > 2:
            _check_flag(*word[2:].partition("=")[::2], following=flags[index + 1] if index + 1 < len(flags) else "")
        elif index == 0 or "=" in flags[index - 1] or not flags[index - 1].startswith("--"):
            raise UserError(
                f"{word!r} is no flag of tritonserver; they begin with --, as in --tritonserver-flag=--log-verbose=1"
            )
    return tuple(flags)


def _check_flag(name: str, value: str, following: str) -> None:
    for owned, remedy in _OWNED.items():
        if owned.startswith(name):  # tritonserver takes the beginning of a flag for the whole of it
            raise UserError(f"tritonserver's flag --{name} is the launcher's own; {remedy}")
    value = value or following
    if name == "backend-config" and "shm-region-prefix-name" in value:
        raise UserError(
            "shm-region-prefix-name in --backend-config is the launcher's own; it removes shared memory by it"
        )
    if any(restriction.startswith(name) for restriction in _RESTRICTIONS):
        taken = [api for api in value.partition(":")[0].split(",") if api in RESTRICTED_APIS.split(",")]
        if taken:
            raise UserError(
                f"the API {taken[0]} asks for the admin key already (docs/triton.md); leave it out of --{name}"
            )
