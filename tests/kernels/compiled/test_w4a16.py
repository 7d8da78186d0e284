"""What the W4A16 kernel's machine code was brought to: few instructions a weight, which stay in registers."""

from __future__ import annotations

import re

import pytest

from kernels import w4a16
from tests.kernels.toolchain import Compiled, compile_variant

# Variant -> the most instructions of the loop for each weight: what was reached, and a twentieth for other compilers.
LIMITS = {
    "gate_up-16-g128-sm80": 3.5,
    "gate_up-16-g128-sm90": 3.6,
    "qkv-16-g128-sm90": 3.45,
    "down-64-g128-sm90": 3.65,
    "gate_up-256-g128-sm90": 4.55,
    "gate_up-8192-g128-sm90": 3.6,
}
PRODUCTS = {80: "HMMA", 90: "HGMMA"}


def compiled(name: str) -> tuple[Compiled, list[str], float]:
    """And the loop, and the weights that a thread has of a step."""
    variant = w4a16.variants()[name]
    (architecture,) = variant.architectures
    made = compile_variant(variant, architecture)
    weights = variant.constants["GROUP"] * variant.constants["BLOCK_N"] / (32 * variant.num_warps)
    return made, made.loop(PRODUCTS[architecture], "LDGSTS"), weights


@pytest.mark.parametrize("name", LIMITS)
def test_the_loop_has_few_instructions_a_weight(name: str) -> None:
    _, loop, weights = compiled(name)
    assert len(loop) / weights <= LIMITS[name]
    code = "\n".join(loop)
    # Two weights an instruction, and bytes that are put together by one permutation for at most two of them.
    assert len(re.findall(r"\bH(?:ADD|MUL|FMA)2\.BF16_V2\b", code)) <= 1.1 * weights
    assert len(re.findall(r"\bPRMT\b", code)) <= 0.6 * weights


@pytest.mark.parametrize("name", [name for name in w4a16.variants() if name.endswith("sm90")])
def test_weights_are_a_register_operand_of_wgmma_and_parameters_are_copied_ahead(name: str) -> None:
    made, loop, _ = compiled(name)
    products = [each for each in loop if "HGMMA" in each]
    assert products and all(re.search(r"HGMMA\S* R\d+, R\d+, gdesc", each) for each in products)
    # At most a group's scales and zeros are exchanged through shared memory.
    assert len(re.findall(r"\bSTSM?\b", made.sass[: made.sass.rindex("HGMMA")])) <= 2
    if w4a16.variants()[name].constants["IN_WORDS"]:
        assert not any(re.search(r"\bLDG\b", each) for each in loop)


@pytest.mark.parametrize("name", ["gate_up-16-g128-sm80", "gate_up-16-g128-sm100"])
def test_rows_of_the_weight_are_copied_sixteen_bytes_at_once(name: str) -> None:
    sass = compile_variant(w4a16.variants()[name], w4a16.variants()[name].architectures[0]).sass
    assert "LDGSTS.E.BYPASS.128" in sass and "LDGSTS.E.64" not in sass
