"""Compiles a kernel for a GPU that is not here, and reads what the machine code says of itself."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.common.triton_runtime import Variant

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack_bytes: int  # spilled to local memory
    local_bytes: int
    shared_bytes: int
    cubin: bytes

    @property
    def sass(self) -> str:
        """The disassembly, made when it is asked for: it takes longer than all the rest of a variant that Triton has cached."""
        return _disassembled(self.cubin)

    def count(self, mnemonic: str) -> int:
        """The number of instructions that have this mnemonic."""
        return len(re.findall(rf"\b{re.escape(mnemonic)}\b", self.sass))

    def loop(self, *holding: str) -> list[str]:
        """The instructions, NOP left out, of the longest backward branch over all of these mnemonics: from its target to it."""
        targets, code, longest = {}, [], []
        for label, instruction in re.findall(r"^\s*(?:(\.L\w+):|/\*[0-9a-f]+\*/\s+(.*?)\s*;)", self.sass, re.MULTILINE):
            if label:
                targets[label] = len(code)
                continue
            code.append(instruction)
            branch = re.search(r"\bBRA\b.*?(\.L\w+)", instruction)
            if branch and branch[1] in targets:
                body = [each for each in code[targets[branch[1]] :] if not each.startswith("NOP")]
                text = "\n".join(body)
                if len(body) > len(longest) and all(re.search(rf"\b{each}\b", text) for each in holding):
                    longest = body
        return longest


def compile_variant(variant: Variant, architecture: int) -> Compiled:
    """architecture: compute capability times ten: 80, 90 or 100."""
    names = variant.kernel.arg_names
    types = {name: variant.types.get(name, "constexpr") for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in variant.types.items()
        if kind.startswith("*") or name in variant.divisible
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(variant.kernel, types, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    cubin = made.asm["cubin"]
    usage = _run("cuobjdump", "--dump-resource-usage", cubin)
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(numbers["REG"], numbers["STACK"], numbers["LOCAL"], made.metadata.shared, cubin)


@cache
def _disassembled(cubin: bytes) -> str:
    return _run("nvdisasm", "-c", cubin)


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(TOOLS / tool), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
