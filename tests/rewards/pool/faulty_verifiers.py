"""Reward functions that break in every way that one can: what `solution_str` names, they do."""

import os
import re
import signal
import subprocess
import time


def compute_score(solution_str, extra_info):
    return ACTIONS[solution_str](extra_info)


def hang_in_c(extra_info):
    re.match(r"(a|aa)+$", "a" * 200 + "b")


def hang_with_signals_blocked(extra_info):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    time.sleep(600)


def hang_with_a_child(extra_info):
    child = subprocess.Popen(["sleep", "600"])
    with open(extra_info["file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def full_memory(extra_info):
    blocks = []
    while True:
        blocks.append(bytearray(16 << 20))


def kill_self(extra_info):
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(extra_info):
    os.write(2, b"the last words")
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_once(extra_info):
    """Dies the first time, answers the second: the file tells them apart."""
    if not os.path.exists(extra_info["file"]):
        open(extra_info["file"], "w").close()
        os._exit(1)
    return 0.25


def count_then_exit(extra_info):
    with open(extra_info["file"], "a") as file:
        file.write("x")
    os._exit(0)


def fails_at_first(extra_info):
    """As often as it is told to, in whatever process."""
    with open(extra_info["file"], "a+") as file:
        file.write("x")
        file.seek(0)
        if len(file.read()) <= extra_info["times"]:
            raise ConnectionError("503")
    return 1.0


def batch_that_fails_at_first(solution_strs, extra_infos):
    """With its second answer, in its first call."""
    with open(extra_infos[0]["file"], "a+") as file:
        file.write(str(len(solution_strs)))
        file.seek(0)
        if len(file.read()) == 1:
            return [0.0, float("nan"), 0.0]
    return [float(text) for text in solution_strs]


def raises(extra_info):
    raise KeyError("what is missing")


def chatty(extra_info):
    print("x" * 100_000)
    os.write(2, b"y" * 100_000)
    return 0.5


ACTIONS = {
    "hang in c": hang_in_c,
    "hang with signals blocked": hang_with_signals_blocked,
    "hang with a child": hang_with_a_child,
    "full memory": full_memory,
    "exit 0": lambda extra_info: os._exit(0),
    "exit 3": lambda extra_info: os._exit(3),
    "sys exit": lambda extra_info: exit(0),
    "kill self": kill_self,
    "segfault": segfault,
    "crash once": crash_once,
    "count then exit": count_then_exit,
    "fails at first": fails_at_first,
    "raises": raises,
    "chatty": chatty,
    "nan": lambda extra_info: float("nan"),
    "inf": lambda extra_info: float("inf"),
    "huge number": lambda extra_info: 10**400,
    "none": lambda extra_info: None,
    "text": lambda extra_info: "1.0",
    "complex": lambda extra_info: 1 + 0j,
    "dict without score": lambda extra_info: {"value": 1.0},
    "dict with nan": lambda extra_info: {"score": float("nan")},
    "huge": lambda extra_info: {"score": 1.0, "remark": "x" * (40 << 20)},
    "echo": lambda extra_info: extra_info["value"],
    "dict": lambda extra_info: {"score": 0.5, "why": "half", "set": {1}, "object": object},
    "true": lambda extra_info: True,
    "sleep": lambda extra_info: time.sleep(extra_info["seconds"]) or 1.0,
}
