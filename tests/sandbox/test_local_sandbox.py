"""What an honest program gets and gives: as a whole, and call by call."""

import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distflow.sandbox.inside.program_messages import NotPlain
from distflow.sandbox.interface import Broken, Raised
from distflow.sandbox.local_sandbox import Sandbox
from tests.sandbox.conftest import LIMITS
from tests.sandbox.test_attacks import family

STANDARD = """
import array, asyncio, base64, bisect, bz2, calendar, cmath, collections, concurrent.futures, configparser, contextlib
import copy, csv, ctypes, datetime, decimal, difflib, email.message, enum, fractions, functools, getpass, gzip, hashlib
import heapq, hmac, html.parser, http.client, imaplib, inspect, itertools, json, logging, lzma, math, numbers, operator
import os, pathlib, pickle, platform, pprint, queue, random, re, secrets, shutil, socket, sqlite3, ssl, statistics
import string, struct, subprocess, tempfile, textwrap, threading, time, timeit, tokenize, types, typing, unicodedata
import unittest, urllib.parse, uuid, warnings, weakref, xml.etree.ElementTree, zipfile, zlib, zoneinfo
print(decimal.Decimal(2).sqrt(), hashlib.sha256(b"").hexdigest()[:8], len(random.sample(range(9), 3)))
print(sqlite3.connect(":memory:").execute("select 6 * 7").fetchone(), datetime.datetime.now().year > 2000)
import sys
print(open("/dev/null", "w").write("x"), len(os.urandom(4)), __name__, __file__, sys.argv)
"""  # noqa: E501


def test_a_program_reads_prints_and_ends(sandbox):
    ran = sandbox.run(
        "import sys\nprint(sum(map(int, input().split())))\nprint('ü', file=sys.stderr)\nexit(3)",
        "1 2 39\n",
    )
    assert (ran.status, ran.exit_code, ran.stdout, ran.stderr, ran.cut) == (
        "exit",
        3,
        "42\n",
        "ü\n",
        False,
    )
    assert 0 < ran.seconds < LIMITS.wall_s


def test_the_standard_library_is_there(sandbox):
    ran = sandbox.run(STANDARD)
    assert ran.stderr == "" and ran.status == "ok"
    assert ran.stdout.splitlines()[1:] == ["(42,) True", "1 4 __main__ program.py ['program.py']"]
    assert ran.stdout.startswith("1.414213562373095048801688724 e3b0c442 3\n")


def test_a_traceback_shows_the_program_alone(sandbox):
    ran = sandbox.run("def divide():\n    return 1 / 0\n\ndivide()")
    assert ran.exit_code == 1
    assert "line 2, in divide\n    return 1 / 0" in ran.stderr and "distflow" not in ran.stderr
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")
    ran = sandbox.run("x = [")
    assert ran.exit_code == 1 and "SyntaxError" in ran.stderr and "distflow" not in ran.stderr


def test_output_beyond_what_is_kept(sandbox):
    ran = sandbox.run("print('x' * 200_000)")
    assert (ran.status, ran.cut, len(ran.stdout)) == ("ok", True, LIMITS.output_bytes)
    assert (
        sandbox.run("import sys\nsys.stdout.buffer.write(bytes([65, 255, 66]))").stdout
        == "A\ufffdB"
    )


def test_large_input_is_neither_cut_nor_waited_for(sandbox):
    text = "1234567\n" * 500_000
    assert sandbox.run("import sys\nprint(len(sys.stdin.read()))", text).stdout == f"{len(text)}\n"
    assert sandbox.run("print('not read')", text).stdout == "not read\n"
    assert (
        sandbox.run("import sys\nprint(sys.stdin.buffer.read())", "\udcff").stdout == "b'\\xff'\n"
    )


def test_the_processor_is_limited_apart_from_the_clock(sandbox):
    sandbox.limits = LIMITS._replace(cpu_s=0.5)
    ran = sandbox.run("while True: pass")
    sandbox.limits = LIMITS
    assert ran.status == "time" and 0.8 < ran.seconds < 15, "whole seconds, rounded up"


def test_values_go_in_and_come_out_as_they_are(sandbox):
    with sandbox.open("def f(*args, **kwargs): return args, kwargs") as session:
        given = [1, True, 1.0, (2,), [3], {4}, {"five": None}, b"6", 7j, 10**30, "ü\ud800"]
        args, kwargs = session.call("f", given, {"nan": math.nan})
        assert [type(value) for value in args] == [type(value) for value in given] and list(
            args
        ) == given
        assert math.isnan(kwargs["nan"])
        with pytest.raises(NotPlain):
            session.call("f", [object()])
        assert session.call("f") == ((), {})


def test_state_is_kept_between_calls_and_not_between_processes(sandbox):
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    print(x)\n    return seen"
    with sandbox.open(code) as session, sandbox.open(code) as other:
        assert (session.call("f", [1]), session.call("f", [2]), other.call("f", [3])) == (
            [1],
            [1, 2],
            [3],
        )
        assert (session.stdout, other.stdout) == ("1\n2\n", "3\n")


def test_a_process_is_like_one_of_pythons_own(sandbox):
    """Forked without Python's hooks: what is random differs, and nothing is there that the server
    did before."""
    look = (
        "import gc, linecache, os, random, sys, threading\n"
        "print(random.getrandbits(128), file=sys.stderr)\n"
        "print('program' in sys.modules, list(linecache.cache), gc.isenabled(), "
        "threading.active_count())\n"
        "print(threading.current_thread() is threading.main_thread(), threading.get_native_id() == "
        "os.getpid())\n"
        "with threading.Lock(): print(threading.main_thread().is_alive())\n"
    )
    said = [sandbox.run(look) for _ in range(3)]
    assert {ran.stdout for ran in said} == {"False ['program.py'] True 1\nTrue True\nTrue\n"}
    assert len({ran.stderr for ran in said}) == 3


def test_sets_have_one_order(sandbox):
    """Also in the sandbox of another run: a verdict can be had again."""
    code = "print({str(number) for number in range(100)})"
    with Sandbox(LIMITS, sandbox.level.name) as other:
        assert sandbox.run(code).stdout == other.run(code).stdout


def test_main_is_not_run_in_a_session(sandbox):
    with sandbox.open(
        "name = __name__\ndef f(): return name\nif name == '__main__': exit(1)"
    ) as session:
        assert session.call("f") == "program"


def test_what_a_function_raises(sandbox):
    with sandbox.open("def f(x): return 1 // x\ndef g(n): return g(n + 1)") as session:
        for call, name in (
            (("f", [0]), "ZeroDivisionError"),
            (("f", ["a"]), "TypeError"),
            (("g", [0]), "RecursionError"),
        ):
            with pytest.raises(Raised) as raised:
                session.call(*call)
            assert raised.value.type == name

        with pytest.raises(Raised, match="NameError: .*'no'"):
            session.call("no")
        assert session.call("f", [1]) == 1

    for code, name in (
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("import numpy", "ModuleNotFoundError"),
    ):
        with pytest.raises(Raised) as raised:
            sandbox.open(code)
        assert raised.value.type == name


def test_programs_of_several_threads_at_once(sandbox):
    """A hang of one delays no other."""
    said: list[str] = []
    before = family(sandbox._server.pid)

    with sandbox.open(
        "import time\ndef f(): time.sleep(600)", LIMITS._replace(wall_s=600.0)
    ) as session:
        (program,) = family(sandbox._server.pid) - before
        hanging = ThreadPoolExecutor(1).submit(session.call, "f")
        others = [
            threading.Thread(target=lambda i=i: said.append(sandbox.run(f"print({i})").stdout))
            for i in range(8)
        ]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        assert not hanging.done()
        os.kill(program, signal.SIGKILL)
        with pytest.raises(Broken):
            hanging.result()

    assert sorted(said) == [f"{i}\n" for i in range(8)]


# Each forges what it can: the code of a module, what is called in it, and the cause of which it is
# broken.
FORGED = {
    "an answer ahead of the question": (
        "import os, sys\nframe = sys._getframe()\n"
        "while 'token' not in frame.f_locals: frame = frame.f_back\n"
        "token = frame.f_locals['token']\nbody = b'{\"value\": 42}'\n"
        "def f(): os.write(3, token + len(body).to_bytes(4, 'big') + body)",
        "frame",
    ),
    "garbage": ("import os\ndef f(): os.write(3, b'x' * 1000)", "frame"),
    "a length without end": ("import os\ndef f(): os.write(3, b'x' * 8 + b'\\xff' * 4)", "frame"),
    "1 GB of answers": ("import os\ndef f():\n  while True: os.write(3, bytes(2**20))", "frame"),
    "nested without end": (
        "import os, sys\nframe = sys._getframe()\n"
        "while 'token' not in frame.f_locals: frame = frame.f_back\n"
        "def f():\n  body = b'[' * 10**6\n"
        "  os.write(3, frame.f_locals['token'] + len(body).to_bytes(4, 'big') + body)",
        "frame",
    ),
    "half a header": ("import os, time\ndef f():\n  os.write(3, b'xx')\n  os._exit(0)", "exit"),
    "exit 0 before an answer": ("import os\ndef f(): os._exit(0)", "exit"),
    "exit": ("def f(): raise SystemExit", "exit"),
    "the descriptor closed": ("import os\ndef f():\n  os.close(3)\n  return 42", "exit"),
    "all closed": ("import os\ndef f():\n  os.closerange(0, 99)\n  os._exit(0)", "exit"),
    "memory": ("def f(): return bytearray(2**40)", "memory"),
    "memory of an answer": ("def f(): return [bytes(2**24)] * 100", "memory"),
    "an answer too long": ("def f(): return 'x' * 2**22", "value"),
    "a deep answer": ("def f():\n  x = []\n  for _ in range(10**4): x = [x]\n  return x", "value"),
    "an answer in itself": ("def f():\n  x = []\n  x.append(x)\n  return x", "value"),
    "a shared answer": (
        "def f():\n  x = []\n  for _ in range(60): x = [x, x]\n  return x",
        "value",
    ),
    "an object": (
        (
            "class E:\n  def __eq__(s, o): return True\n  def __repr__(s): return '42'\n"
            "def f(): return E()"
        ),
        "value",
    ),
    "a class that lies": (
        "class E:\n  __class__ = int\n  def __eq__(s, o): return True\ndef f(): return E()",
        "value",
    ),
    "the function itself": ("def f(): return f", "value"),
    "a signal": ("import ctypes\ndef f(): ctypes.string_at(0)", "signal"),
    "output without end": ("def f():\n  while True: print('x' * 10**6)", "output"),
}


@pytest.mark.parametrize("code, cause", FORGED.values(), ids=FORGED)
def test_no_answer_but_an_honest_one(sandbox, code, cause):
    with sandbox.open(code) as session:
        with pytest.raises(Broken) as broken:
            session.call("f")
            session.call("f")

        assert broken.value.cause == cause, broken.value
        if cause != "value":
            with pytest.raises(Broken):
                session.call("f")


def test_an_answer_of_an_own_class_is_the_plain_value_below_it(sandbox):
    """Whatever the class says of its equality."""
    code = (
        "class E({0}):\n  def __eq__(s, o): return True\n  __hash__ = {0}.__hash__\n"
        "def f(): return E({1})"
    )

    for base, made, value in (
        ("int", "7", 7),
        ("str", "'a'", "a"),
        ("dict", "{1: 2}", {1: 2}),
        ("list", "[3]", [3]),
    ):
        with sandbox.open(code.format(base, made)) as session:
            found = session.call("f")
        assert type(found) is type(value) and found == value


def test_a_hang_in_a_call_and_in_the_module(sandbox):
    sandbox.limits = LIMITS._replace(wall_s=0.3)
    with (
        pytest.raises(Broken, match=r"out of time \("),
        sandbox.open("def f():\n  while True: pass") as session,
    ):
        session.call("f")

    with pytest.raises(Broken, match=r"out of time \("):
        sandbox.open("import time\ntime.sleep(99)")

    with (
        pytest.raises(Broken, match=r"out of time \("),
        sandbox.open("import time\ndef f(): time.sleep(0.1)") as session,
    ):
        for _ in range(9):  # the time of all calls counts
            session.call("f")

    sandbox.limits = LIMITS


def test_what_judges_is_not_in_reach(sandbox):
    """A program finds its own code and arguments in memory, nothing of who asks, and nothing of
    programs before."""
    # expected-42, not in this code
    secret = "".join(map(chr, (101, 120, 112, 101, 99, 116, 101, 100, 45, 52, 50)))
    sandbox.run(f"kept = {secret!r} * 100\nprint(kept)", secret)
    with sandbox.open(f"def f(x): return {secret!r}") as session:
        session.call("f", [secret])
    look = """
import gc, sys
wanted = "".join(map(chr, (101, 120, 112, 101, 99, 116, 101, 100, 45, 52, 50)))
def texts(value, depth=0):
    if isinstance(value, (str, bytes, bytearray)):
        yield value if isinstance(value, str) else value.decode("latin-1")
    elif depth < 3 and isinstance(value, dict):
        for key, item in list(value.items()):
            yield from texts(key, depth + 1)
            yield from texts(item, depth + 1)
    elif depth < 3 and isinstance(value, (list, tuple, set)):
        for item in list(value):
            yield from texts(item, depth + 1)
gc.unfreeze()
found = [text[:60] for value in gc.get_objects() for text in texts(value) if wanted in text and value is not globals()]
frame, names = sys._getframe(), []
while frame:
    held = {name: value for name, value in frame.f_locals.items() if name != "wanted"}
    names += [name for name, value in held.items() if any(wanted in text for text in texts(value))]
    frame = frame.f_back
print([text for text in found if text != wanted], names)
"""  # noqa: E501
    assert sandbox.run(look).stdout == "[] []\n"
