"""Flags for tritonserver that pass through the launcher."""

from __future__ import annotations

import pytest

from deploy import invocation, passed_flags
from deploy.errors import UserError
from tests.deploy.test_invocation import flags


@pytest.mark.parametrize(
    "given",
    [
        ("--log-verbose=1",),
        ("--log-verbose", "1", "--strict-readiness=true"),
        ("--backend-config=python,shm-default-byte-size=4194304",),
        ("--http-restricted-api=inference:x-key=secret",),
        ("--trace-config=level=TIMESTAMPS",),
    ],
)
def test_what_is_not_the_launchers_passes(given: tuple[str, ...]) -> None:
    assert passed_flags.check(given) == given


@pytest.mark.parametrize(
    "flag, remedy",
    [
        ("--http-port=1", "--http-port PORT"),
        ("--grpc-address=0.0.0.0", "--host ADDRESS"),
        ("--exit-timeout-secs", "--exit-timeout SECONDS"),
        ("--model-repository=/x", "--model-repository DIR"),
        ("--model-repo=/x", "--model-repository DIR"),  # tritonserver takes a beginning for the whole
        ("--model-control-mode=none", "readiness"),
        ("--backend-config=python,shm-region-prefix-name=x", "shared memory"),
        ("--http-restricted-api=inference,model-repository:x-key=y", "model-repository asks for the admin key"),
    ],
)
def test_what_is_the_launchers_is_refused_by_name_with_the_option_for_it(flag: str, remedy: str) -> None:
    with pytest.raises(UserError) as error:
        passed_flags.check((flag, "1"))
    assert remedy in str(error.value) and flag.partition("=")[0][2:].split("-")[0] in str(error.value)


@pytest.mark.parametrize("given", [("serve",), ("-x",), ("--log-verbose=1", "2"), ("--",)])
def test_what_is_no_flag_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="no flag of tritonserver"):
        passed_flags.check(given)


def test_every_flag_that_the_launcher_gives_is_its_own() -> None:
    for flag in (word for word in flags() if word.startswith("--") and not word.startswith("--backend-config")):
        with pytest.raises(UserError, match="launcher's own"):
            passed_flags.check((flag,))
    for flag in invocation.SECRET_FLAGS.values():
        with pytest.raises(UserError, match="admin key"):
            passed_flags.check((flag,))
