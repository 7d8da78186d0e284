"""Where the shared libpython is that the Python backend's stub embeds. Standard library only; runs before the
environment.

The stub of the nvidia-pytriton wheel has libpythonX.Y.so.1.0 as its only missing library. It must be the one of the
Python the environment was built with: an interpreter with a shared library of its own comes first, by LD_LIBRARY_PATH.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import sysconfig


def library_name(version: str | None = None) -> str:
    """libpython3.11.so.1.0 for the running interpreter, or for `version` ("3.11")."""
    return "libpython{}.so.1.0".format(version or "{}.{}".format(*sys.version_info[:2]))


def own_directory() -> str | None:
    """Directory of the running interpreter's own shared libpython, or None when it was linked statically."""
    for directory in (sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")):
        if directory and os.path.isfile(os.path.join(directory, library_name())):
            return directory
    return None


def system_path(name: str) -> str | None:
    """Path of the library the loader would take by itself, or None."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        listing = ""
    for line in listing.splitlines():
        entry, _, path = line.strip().partition(" => ")
        if entry.split(" ")[0] == name and os.path.isfile(path):
            return path
    found = glob.glob("/usr/lib/*-linux-gnu/" + name) + glob.glob("/usr/lib64/" + name)
    return found[0] if found else None


def search_path() -> list[str]:
    """Directories to put first on LD_LIBRARY_PATH so that the stub runs this interpreter's version: a list of 0 or 1."""
    directory = own_directory()
    return [] if directory is None else [directory]


def find(version: str | None = None) -> str | None:
    """Path of a usable libpython for the stub, or None. Without `version`: for the running interpreter."""
    if version is None:
        directory = own_directory()
        if directory is not None:
            return os.path.join(directory, library_name())
    return system_path(library_name(version))
