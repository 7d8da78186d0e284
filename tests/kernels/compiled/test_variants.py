"""Every specialisation of every kernel, for each architecture: no spills, shared memory that is there, the meant instructions."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import kernels
from kernels import w4a8, w4a16, w8a8
from kernels.common.triton_runtime import Variant
from tests.kernels import kv4_decode, shared_memory
from tests.kernels.shared_memory import SHARED_LIMIT, Product
from tests.kernels.toolchain import compile_variant

MODULES = [importlib.import_module(f"kernels.{path.stem}") for path in Path(kernels.__file__).parent.glob("*.py")]
VARIANTS = [
    pytest.param(variant, architecture, id=f"{module.__name__.removeprefix('kernels.')}-{name}-{architecture}")
    for module in MODULES
    if hasattr(module, "variants")
    for name, variant in module.variants().items()
    for architecture in variant.architectures
]


@pytest.mark.feature("003-70")
@pytest.mark.parametrize("variant, architecture", VARIANTS)
def test_compiles_as_it_was_meant(variant: Variant, architecture: int) -> None:
    made = compile_variant(variant, architecture)
    assert made.stack_bytes == 0 and made.local_bytes == 0, (
        f"{made.registers} registers, spills {made.stack_bytes} bytes"
    )
    assert made.shared_bytes <= SHARED_LIMIT[architecture]
    for mnemonic in variant.instructions.get(architecture, ()):
        assert made.count(mnemonic), f"no {mnemonic} in the machine code"


SMALL = [
    pytest.param(module, name, id=f"{module.__name__.removeprefix('kernels.')}-{name}")
    for module in (w8a8, w4a16, w4a8)
    for name, variant in module.variants().items()
    if 80 in variant.architectures and "BLOCK_M" in variant.constants
]


@pytest.mark.feature("003-69")
@pytest.mark.parametrize("module, name", SMALL)
def test_products_take_the_shared_memory_that_their_tiles_say(module: ModuleType, name: str) -> None:
    """So that tests/kernels/shared_memory.py, which compiles nothing, can say what fits."""
    variant = module.variants()[name]
    of = variant.constants
    sizes = of["BLOCK_M"], of["BLOCK_N"]
    by_words = {w8a8: (), w4a16: ("scales", "zeros"), w4a8: ("group_scales", "zeros")}[module]
    is_in_words = bool(of.get("IN_WORDS")) and by_words[0] in variant.types
    words = len(variant.types.keys() & by_words) if is_in_words else 0
    step = {
        w8a8: lambda: shared_memory.w8a8_step(*sizes, of["BLOCK_K"]),
        w4a16: lambda: shared_memory.w4a16_step(*sizes, of["GROUP"], words),
        w4a8: lambda: shared_memory.w4a8_step(*sizes, words),
    }[module]()
    expected = Product(name, 80, step, variant.num_stages).shared_bytes
    assert compile_variant(variant, 80).shared_bytes == expected


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
