"""Directories of the configuration in which an engine keeps what clients have sent: KV, and token ids of sessions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from backend.api.errors import ConfigError


def own_directory(key: str, directory: str) -> Path:
    """Make the directory where it is missing, for its user alone. `key`: of the configuration, for errors.

    Raises ConfigError if it belongs to another user, if others may write to it, or if it cannot be used.
    """
    path = Path(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{key} is {directory}, which cannot be used ({error.strerror}); name another one") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{key} is {directory}, where others may write; name one of this user alone, and take the right to write from others "
            f"(chmod 700)"
        )
    return path
