"""Runs a server in this process's own group, and kills all of the group when the server ends, or standard input does:
then the worker that asked for it is gone, in whatever way, and its private folders go, too. Started with
`start_new_session`; imports no distflow."""

import glob
import os
import shutil
import signal
import subprocess
import sys
import threading


def main() -> None:
    folder, *command = sys.argv[1:]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_wait, args=(server,), daemon=True).start()
    sys.stdin.buffer.read()
    for path in (folder, *glob.glob(f"/dev/shm/{os.path.basename(folder)}-*")):
        shutil.rmtree(path, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _wait(server: "subprocess.Popen[bytes]") -> None:
    """vLLM's own processes survive the one that answers requests."""
    print(f"\nthe server ended with status {server.wait()}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
