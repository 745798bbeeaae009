"""Runs a server in this process's group, and kills the whole group when the server, or the worker
that started it, has ended; then the worker's private folders are removed too. Started with
`start_new_session`; does not import distflow."""

import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import threading


def main() -> None:
    folder, owner, *command = sys.argv[1:]
    ended = os.pidfd_open(int(owner))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_wait, args=(server,), daemon=True).start()
    select.select([ended], [], [])
    for path in (folder, *glob.glob(f"/dev/shm/{os.path.basename(folder)}-*")):
        shutil.rmtree(path, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _wait(server: "subprocess.Popen[bytes]") -> None:
    """Wait for the server; vLLM's other processes survive the one that answers requests."""
    print(f"\nthe server ended with status {server.wait()}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
