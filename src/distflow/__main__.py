"""The command `distflow`, and `python -m distflow`: handles Ctrl-C before anything else is
imported."""

import os
import signal
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd():
    del sys.path[0]  # put there by Python; the current folder may hold modules that shadow others


def main() -> int:
    """Run the command; its own handling of Ctrl-C replaces this one while there is something to
    close."""
    signal.signal(signal.SIGINT, _leave)
    from distflow.processes.ending import end_users_processes_at_exit, exit_soon

    end_users_processes_at_exit()
    from distflow.cli import main as run_command

    status = run_command()
    exit_soon(status)
    return status


def _leave(number: int, frame: object) -> None:
    os.write(2, b"distflow: ended by SIGINT\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
