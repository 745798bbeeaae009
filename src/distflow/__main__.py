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
    # when the command has ended, and Python's own end waits for what the user's code started
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_nothing)
    from distflow.cli import main as run_command

    status = run_command()
    exit_soon(status)
    return status


def _leave(number: int, frame: object) -> None:
    os.write(2, f"distflow: ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def _leave_nothing(number: int, frame: object) -> None:
    """The same, and what this process started ends too."""
    from distflow.processes.descendants import end_descendants

    signal.signal(number, signal.SIG_IGN)  # the next one would start from the beginning
    end_descendants()
    _leave(number, frame)


if __name__ == "__main__":
    sys.exit(main())
