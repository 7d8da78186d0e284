"""Writes the tables of architectures and types in docs/gguf.md from backend/architectures/gguf/, between two markers.

.venv/bin/python -m tools.write_gguf_table          rewrite them
.venv/bin/python -m tools.write_gguf_table --check  fail when they are not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from backend.api.checkpoint.gguf import TYPES, BlockType
from backend.architectures.gguf.families import GGUF_FAMILIES
from backend.architectures.gguf.held import FLOATS, INT8, held_bits
from backend.architectures.registry import FAMILIES
from tools.marked_part import MarkedPart

PART = MarkedPart(
    "gguf.md",
    "<!-- architectures and types: written by tools/write_gguf_table.py -->",
    "<!-- end of architectures and types -->",
)
# Files that say one of the architectures, of models whose config.json names another one.
ALSO = {
    "llama": ["MistralForCausalLM", "MixtralForCausalLM"],
    "mistral3": ["Mistral3ForConditionalGeneration"],
    "gemma3": ["Gemma3ForConditionalGeneration"],
    "granite": ["GraniteMoeHybridForCausalLM"],
    "olmo2": ["Olmo3ForCausalLM"],
    "granitemoe": ["GraniteMoeForCausalLM"],
    "qwen35": ["Qwen3_5ForConditionalGeneration"],
    "qwen35moe": ["Qwen3_5MoeForConditionalGeneration"],
}


def tables() -> str:
    """Both tables in Markdown, with empty lines around them."""
    architectures = [["general.architecture", "models", "architecture in config.json"]]
    for name, family in GGUF_FAMILIES.items():
        of_file = [family.architecture, *ALSO.get(name, [])]
        models = "; ".join(FAMILIES[each].models.split(";")[0] for each in of_file)
        architectures.append([f"`{name}`", models, ", ".join(f"`{each}`" for each in of_file)])
    types = [["type", "bits in the file", "bits in memory on a CPU", "on a GPU"], *map(_type, TYPES.values())]
    return f"\n{_table(architectures)}\n\n{_table(types)}\n"


def _type(kind: BlockType) -> list[str]:
    own = 8 * kind.num_bytes / kind.size
    if kind.name in FLOATS:
        return [kind.name, f"{own:g}", "as it is", "as it is"]
    on_gpu = "4.5" if kind.name == "Q4_0" else "bfloat16"
    note = ", int8 where model.kernels=torch" if kind.name in INT8 else ""
    return [kind.name, f"{own:g}", f"{held_bits({kind.name}):g}{note}", on_gpu]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(PART.run(tables()))
