"""Writes the tables of docs/parameters.md, between two markers, from the tables of parameters of every interface.

.venv/bin/python -m tools.write_parameter_table          rewrite them
.venv/bin/python -m tools.write_parameter_table --check  fail when they are not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby

from backend.api.foreign import ForeignParameter
from backend.serving.upstream_parameters import PARAMETERS, QUEUE_SIZE
from backend.serving.wires.vllm_engine_args import ARGUMENTS as VLLM_ARGUMENTS
from compat.llm.parameters import ARGUMENTS as LLM_ARGUMENTS
from compat.lmdeploy.tables import GENERATION, PYTORCH, TURBOMIND
from compat.trtllm.parameters import ATTRIBUTES
from tools.marked_part import MarkedPart

PART = MarkedPart(
    "parameters.md", "<!-- parameters: written by tools/write_parameter_table.py -->", "<!-- end of parameters -->"
)
TABLES: dict[str, Iterable[ForeignParameter]] = {
    **{f"`{role}` in config.pbtxt": parameters for role, parameters in PARAMETERS.items()},
    "`model.json` of vLLM's backend": VLLM_ARGUMENTS,
    "`LLM` in Python": LLM_ARGUMENTS,
    "`ExecutorConfig` in Python": ATTRIBUTES,
    "`TurbomindEngineConfig` of LMDeploy in Python": TURBOMIND,
    "`PytorchEngineConfig` of LMDeploy in Python": PYTORCH,
    "`GenerationConfig` of LMDeploy in Python": GENERATION,
}


def tables() -> str:
    """The tables in Markdown, one for each interface, with empty lines around them."""
    parts = []
    for heading, parameters in TABLES.items():
        rows = [_row(list(alike)) for _, alike in groupby(parameters, _becomes)]
        if parameters is PARAMETERS["tensorrt_llm"]:
            rows.append(f"| `{QUEUE_SIZE}` | sets `limits.max_queue_size` | 0: unset |")
        parts.append("\n".join([f"## {heading}", "", "| key | what becomes of it | |", "|---|---|---|", *rows]))
    return "\n" + "\n\n".join(parts) + "\n"


def _row(alike: list[ForeignParameter]) -> str:
    return f"| {', '.join(f'`{parameter.key}`' for parameter in alike)} | {' | '.join(_becomes(alike[0]))} |"


def _becomes(parameter: ForeignParameter) -> tuple[str, str]:
    """The fate of a parameter, and the note about it. Parameters for which both are alike share a row."""
    if parameter.fate == "refused" and parameter.neutral:
        return "refused", f"{parameter.note}; {', '.join(f'`{value}`' for value in parameter.neutral)} may be set"
    return f"sets `{parameter.target}`" if parameter.target else parameter.fate, parameter.note


if __name__ == "__main__":
    sys.exit(PART.run(tables()))
