"""Cleans up behind a launcher that was SIGKILLed:  python -m deploy.janitor RUN_ID SHM_PREFIX [DIRECTORY]

A launcher holds the other end of this process's standard input and never writes. End of file therefore means that the
launcher is gone, in whatever way. Then: kill what still carries RUN_ID, unlink its shared memory, remove its private
socket directory. After an orderly stop there is nothing left to do and it ends at once.
"""

from __future__ import annotations

import shutil
import signal
import sys

from deploy.processes import kill_run, remove_shared_memory


def main(arguments: list[str]) -> int:
    run_id, shm_prefix = arguments[0], arguments[1]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # The janitor must outlive the launcher.
        signal.signal(ignored, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    left = kill_run(run_id)
    remove_shared_memory(shm_prefix)
    for directory in arguments[2:]:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
