"""Examines a directory for the second level of KV, for `everbatch doctor` (docs/second-level.md)."""

from __future__ import annotations

import os
import stat
from typing import Literal

from backend.api.config.schema import KvCacheConfig

Seen = tuple[Literal["ok", "warn", "fail"], str, str]


def look_at(directory: str) -> Seen:
    """(state, what was seen, what to do). Changes nothing. A directory that is not there yet is looked for above."""
    path = os.path.abspath(directory)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        return "fail", f"{path}: {error.strerror}", "name a directory; a link to one is not followed"
    try:
        return _judge(path, os.fstat(descriptor), os.fstatvfs(descriptor), exists=path == os.path.abspath(directory))
    finally:
        os.close(descriptor)


def _judge(path: str, status: os.stat_result, room: os.statvfs_result, exists: bool) -> Seen:
    if exists and status.st_uid != os.geteuid():
        return "fail", f"{path} belongs to user {status.st_uid}", f"chown it to the user of the server, {os.geteuid()}"
    if exists and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "fail", f"{path} may be written by others ({stat.filemode(status.st_mode)})", "chmod 700"
    if not os.access(path, os.W_OK | os.X_OK):
        return "fail", f"{path} may not be written by this user", "name another directory"
    free, wanted = room.f_bavail * room.f_frsize, KvCacheConfig().directory_bytes
    seen = f"{free >> 30} GiB free in {path}"
    if free < wanted:
        return "warn", seen, f"set kv_cache.directory_bytes to less than that; it is {wanted >> 30} GiB unless set"
    return "ok", seen, ""
