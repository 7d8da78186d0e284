"""Write model_repository/*/config.pbtxt from the tensor tables of backend/serving/wires.

python tools/generate_model_configs.py                        # the committed files
python tools/generate_model_configs.py --output DIR --unary   # decoupled: false, for ModelInfer and /infer clients
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backend.serving.model_config import write_repositories  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT, help="where model_repository and deploy/profiles lie")
    parser.add_argument("--unary", action="store_true", help="decoupled: false")
    arguments = parser.parse_args()
    for path in write_repositories(arguments.output, decoupled=not arguments.unary):
        print(path.relative_to(arguments.output))


if __name__ == "__main__":
    main()
