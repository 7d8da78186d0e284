"""Every specialisation of every kernel, for each architecture: no spills, shared memory that is there, the meant instructions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import kernels
from kernels.common.triton_runtime import Variant
from tests.kernels import kv4_decode
from tests.kernels.toolchain import SHARED_LIMIT, compile_variant

MODULES = [importlib.import_module(f"kernels.{path.stem}") for path in Path(kernels.__file__).parent.glob("*.py")]
VARIANTS = [
    pytest.param(variant, architecture, id=f"{module.__name__.removeprefix('kernels.')}-{name}-{architecture}")
    for module in MODULES
    if hasattr(module, "variants")
    for name, variant in module.variants().items()
    for architecture in variant.architectures
]


@pytest.mark.parametrize("variant, architecture", VARIANTS)
def test_compiles_as_it_was_meant(variant: Variant, architecture: int) -> None:
    made = compile_variant(variant, architecture)
    assert made.stack_bytes == 0 and made.local_bytes == 0, (
        f"{made.registers} registers, spills {made.stack_bytes} bytes"
    )
    assert made.shared_bytes <= SHARED_LIMIT[architecture]
    for mnemonic in variant.instructions.get(architecture, ()):
        assert made.count(mnemonic), f"no {mnemonic} in the machine code"


def test_every_architecture_has_something_of_every_kernel() -> None:
    """A variant of one architecture stands beside others for the rest."""
    compiled = {}
    for parameters in VARIANTS:
        variant, architecture = parameters.values
        compiled.setdefault(variant.kernel, set()).add(architecture)
    assert all(architectures == set(SHARED_LIMIT) for architectures in compiled.values())


@pytest.mark.parametrize("architecture", SHARED_LIMIT)
@pytest.mark.parametrize("name", kv4_decode.LIMITS)
def test_the_decode_loop_has_few_instructions_an_element_and_no_load_that_it_waits_for(
    name: str, architecture: int
) -> None:
    loop = kv4_decode.Loop(name, architecture)
    assert loop.an_element <= kv4_decode.LIMITS[name]
    assert loop.count("LDGSTS") and not loop.count("LDG")
    assert not loop.count("I2F") and not loop.count("LDL")
