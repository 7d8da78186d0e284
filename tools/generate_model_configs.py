"""Write model_repository/*/config.pbtxt from the tensor tables of backend/serving/wires.

python tools/generate_model_configs.py                        # the committed files
python tools/generate_model_configs.py --output DIR --unary   # decoupled: false, for ModelInfer and /infer clients
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backend.serving.model_config import write_repositories  # noqa: E402


def main(
    output: Annotated[Path, typer.Option(help="Where model_repository and deploy/profiles lie.")] = ROOT,
    unary: Annotated[bool, typer.Option("--unary", help="Write decoupled: false.")] = False,
) -> None:
    """Write model_repository/*/config.pbtxt from the tensor tables of backend/serving/wires."""
    for path in write_repositories(output, decoupled=not unary):
        print(path.relative_to(output))


if __name__ == "__main__":
    typer.run(main)
