"""Every specialisation of every kernel, for each architecture: no spills, shared memory that is there, the meant instructions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import kernels
from tests.kernels.toolchain import SHARED_LIMIT, compile_variant

MODULES = [importlib.import_module(f"kernels.{path.stem}") for path in Path(kernels.__file__).parent.glob("*.py")]
VARIANTS = [
    pytest.param(variant, id=f"{module.__name__.removeprefix('kernels.')}-{name}")
    for module in MODULES
    if hasattr(module, "variants")
    for name, variant in module.variants().items()
]


@pytest.mark.parametrize("architecture", SHARED_LIMIT)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_as_it_was_meant(variant, architecture):
    made = compile_variant(variant, architecture)
    assert made.stack_bytes == 0 and made.local_bytes == 0, f"{made.registers} registers, spills {made.stack_bytes} bytes"
    assert made.shared_bytes <= SHARED_LIMIT[architecture]
    for mnemonic in variant.instructions.get(architecture, ()):
        assert made.count(mnemonic), f"no {mnemonic} in the machine code"
