"""Counts the instructions of decode attention's loop: docs/lab/kv4-decode.md. Prints its table:

EVERBATCH_TRITON=1 python -m tests.kernels.kv4_decode
"""

from __future__ import annotations

import re
from collections import Counter

from kernels import decode_attention
from tests.kernels.shared_memory import SHARED_LIMIT
from tests.kernels.toolchain import compile_variant

# Variant -> the most instructions an element of the pool may cost: what was reached, and a tenth for other compilers.
LIMITS = {"4-bit": 2.75, "8-bit-keys-4-bit-values": 4.4, "8-bit": 4.4, "16-bit": 1.85}


class Loop:
    """The loop over the tiles that are seen as a whole: it has the matrix instructions, and the copies of tiles to come."""

    def __init__(self, name: str, architecture: int) -> None:
        variant = decode_attention.variants()[name]
        self.made = compile_variant(variant, architecture)
        self.instructions = self.made.loop("HMMA", "LDGSTS")
        constants = variant.constants
        elements = constants["TILE"] * constants["HEAD_DIM"] * 2 / (32 * variant.num_warps)  # elements of one thread
        self.an_element = len(self.instructions) / elements

    def mnemonics(self) -> Counter[str]:
        return Counter(re.sub(r"^@\S+\s+", "", each).split()[0].split(".")[0] for each in self.instructions)

    def count(self, mnemonic: str) -> int:
        return self.mnemonics()[mnemonic]


def main() -> None:
    print("| Pool | Architecture | Registers | Shared, bytes | Instructions in the loop | For each element |")
    print("|---|---|---|---|---|---|")
    for name in LIMITS:
        for architecture in SHARED_LIMIT:
            loop = Loop(name, architecture)
            row = (name, f"sm_{architecture}", loop.made.registers, f"{loop.made.shared_bytes:,}".replace(",", " "))
            cells = (*row, len(loop.instructions), f"{loop.an_element:.2f}")
            print("|", " | ".join(map(str, cells)), "|")
    common = Loop("4-bit", 90).mnemonics().most_common()
    print("\n4-bit, sm_90:", ", ".join(f"{mnemonic} {count}" for mnemonic, count in common))


if __name__ == "__main__":
    main()
