"""exec a command that must not outlive its parent:  python -m deploy.spawn PARENT_PID STACK_BYTES COMMAND ARGS...

Runs in the child between fork and exec of the server (instead of subprocess's preexec_fn, which is unsafe beside
threads). Keeps the pid. Order: ask for SIGKILL at the parent's death, then look whether the parent died before that,
raise the stack limit, then exec. A command with placeholders for secret flags is stopped at the exec until its parent has
filled them in (deploy/secret_flags.py).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

from deploy import secret_flags

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process by the command. Returns only by raising (OSError: the command cannot be executed)."""
    parent, stack_bytes, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"the launcher (pid {parent}) ended before its server was started")
    raise_stack_limit(stack_bytes)
    if secret_flags.visible(command, os.environ) != command and not secret_flags.trace_me():
        print("everbatch: tracing is not allowed here, so every user of this machine sees the admin key", flush=True)
        command = secret_flags.visible(command, os.environ)
    os.execv(command[0], command)


def raise_stack_limit(stack_bytes: int) -> None:
    """Raise the soft stack limit, which is also the stack size of the server's threads, as far as the hard one
    allows. No limit means threads of 2 MB to glibc, so that is less than any.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = stack_bytes if hard == resource.RLIM_INFINITY else min(stack_bytes, hard)
    if stack_bytes > 0 and (soft == resource.RLIM_INFINITY or soft < wanted):
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
