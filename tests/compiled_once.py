"""One cache of native kernels for the tests of all checkouts of this user: a fresh clone does not compile all variants anew.

An entry is found by a hash over sources, flags and compiler (kernels/cpu/build.py), so that a change is compiled. Registered by
tests/conftest.py; EVERBATCH_CACHE, where it is set, stays.
"""

from __future__ import annotations

import os
from pathlib import Path

from kernels.cpu.trust import distrust_of_directory, make_private_directory

VARIABLE = "EVERBATCH_CACHE"


def share_native_kernels() -> None:
    """Sets VARIABLE for this process and those that it starts, unless the user has no directory that may be trusted."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    directory = home / "everbatch-tests"
    try:
        make_private_directory(directory)
        usable = os.access(directory, os.W_OK) and distrust_of_directory(directory) is None
    except OSError:  # a home that cannot be written, or none: the checkout's cache serves as it does without tests
        return
    if usable:
        os.environ.setdefault(VARIABLE, str(directory))
