"""How many files this process and its children may have open: every connection of a client is one."""

from __future__ import annotations

import resource

WANTED = 65536
NEEDED = 2048  # for a server, its endpoint, and some hundred clients of each


def raise_open_files() -> str | None:
    """Raise the soft limit as far as the hard one allows, for this process and what it starts. Returns what to know where that
    is too low, None where it is enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= NEEDED:
        return None
    return (
        f"warning: a process may have {soft} files open here, and every client's connection is one: with that many clients "
        f"further ones get no answer; allow {NEEDED} or more (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of "
        "docker)"
    )
