"""What the W4A8 kernel's machine words take for granted of Triton's layouts."""

from __future__ import annotations

import re

import pytest
import triton

from kernels import w4a8
from tests.kernels.shared_memory import SHARED_LIMIT
from tests.kernels.toolchain import compile_variant


@pytest.mark.parametrize("architecture", SHARED_LIMIT)
@pytest.mark.parametrize("name", [name for name in w4a8.variants() if name.endswith("group")])
def test_four_bytes_of_a_word_are_of_one_row(name: str, architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """kWidth = 4: a thread has four columns of a row together. They share the group's scale and zero in the word's arithmetic."""
    made, compile_ = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **options: made.append(compile_(*args, **options)) or made[0])
    compiled = compile_variant(w4a8.variants()[name], architecture)
    (unpacking,) = (line for line in made[0].asm["ttgir"].splitlines() if "elementwise_inline_asm" in line)
    layouts = re.findall(r"tensor<\d+x64xi(?:8|32), (#.*?)>(?:,| ->| loc|$)", unpacking)
    assert len(layouts) == 5
    assert all(layout.startswith("#ttg.dot_op<{opIdx = 0") and "kWidth = 4}" in layout for layout in layouts)
    # Bytes are not put together one by one, nor taken through shared memory.
    unpacked = compiled.sass[: compiled.sass.rindex("MMA")]
    assert len(re.findall(r"\bPRMT\b", unpacked)) <= 16 and not re.search(r"\bSTSM?\b", unpacked)
