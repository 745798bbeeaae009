"""What a forked child does behind its walls, done in the fork server some times before.

The interpreter learns as it runs: it fills caches and rewrites code for what it met. What it learns in a child is
lost with it, and each page that it writes to is a page to copy.
"""

import linecache
import socket
import sys

from distflow.sandbox.inside.program import FILE, serve_calls
from distflow.sandbox.inside.values import read_frame, to_text, write_frame

_TIMES = 20
_CALLS = 3
_TOKEN = b"rehearse"
# Ours, and nobody else's: it runs without walls.
_PROGRAM = b"""
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import *


def add(a, b, *rest):
    counts, found = defaultdict(int), [each ** 2 for each in range(3) if each]
    for i, each in enumerate(found):
        if each > 2 and a:
            counts[str(each)] += i
        elif not each:
            found.append(math.gcd(each, 2))
        else:
            while len(found) < 2:
                found += [a]
    text = f"{a} {sorted(counts)} {sum(map(int, '1 2'.split())):.2f}"
    try:
        return {"sum": (a + b, text), "rest": [*found[:1], {1.5, None}]}
    except TypeError as error:
        raise ValueError(str(error)) from None


class Solution:
    def __init__(self, start: int = 3) -> None:
        self.start = start

    def times(self):
        return lambda number: number * self.start
"""


def rehearse() -> None:
    """Leaves nothing that a program could find."""
    question = to_text(["add", [1, 2.5, "a", [[1], (2,)]], {}]).encode()
    for _ in range(_TIMES):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for _ in range(_CALLS):
                write_frame(ours.fileno(), _TOKEN, question)
            ours.shutdown(socket.SHUT_WR)
            serve_calls(_PROGRAM, _TOKEN, theirs.fileno())
            for _ in range(1 + _CALLS):
                read_frame(ours.fileno())
    del sys.modules["program"]
    linecache.cache.pop(FILE)
