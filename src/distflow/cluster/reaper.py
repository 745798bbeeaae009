"""A process that briefly outlives the driver of a Ray, and kills what is left of that Ray's
processes.

Ray ends its workers when their driver dies, but some of its helpers check for their parent only
occasionally.
"""

import os
import select
import sys
from pathlib import Path

from distflow.processes.descendants import Process, descendants, kill_those

_LOOKS_EVERY_S = 0.5


def main() -> None:
    """Arguments: a file to remove at the end, and the pid of the driver, which holds the other end
    of standard input and writes a byte there when it has ended normally."""
    token = sys.argv[1]
    driver = int(sys.argv[2])
    # a process that the driver forked may hold the other end of standard input too
    ended = os.pidfd_open(driver)
    others = descendants(driver)
    known = set[Process]()
    while not (ready := select.select([sys.stdin, ended], [], [], _LOOKS_EVERY_S)[0]):
        known |= descendants(driver) - others
    if not (sys.stdin in ready and sys.stdin.buffer.read(1)):
        kill_those(known | descendants(driver) - others)
    Path(token).unlink(missing_ok=True)
