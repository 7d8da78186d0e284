"""Everything between a fresh clone and a running, supervised tritonserver. Importing this package costs nothing."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).resolve().parent.parent  # the root of the checkout, or of the installed copy
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()  # pip and the container's image bring the packages alone
COMMAND = "./everbatch" if IS_CHECKOUT else "everbatch"  # how a user starts this program
