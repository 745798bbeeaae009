"""Runs a program's test cases one by one in the sandbox, and compares its output or result with the
expected one.

Expected values stay outside of the sandbox: a program gets only its input or arguments. Each case
runs in a new process, or, if there are at least `SHUFFLED_FROM`, all run shuffled in one, so that
memorising the order of answers is useless. If one of a few cases calls the program often, e.g. in a
loop, its first `SHUFFLED_FROM` calls each go to a new process, and the rest to one."""

import inspect
import math
import random
import re
import time
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import closing, contextmanager
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

from distflow.rewards.code import assertion_process
from distflow.rewards.code.assertion_process import exact, rebuilt
from distflow.rewards.code.assertions import Assertions
from distflow.rewards.code.case_formats import CallTests, StreamTests
from distflow.sandbox.inside.program_messages import MAX_YIELDED, NotPlain, Values
from distflow.sandbox.interface import Broken, Limits, Raised, RunResult
from distflow.sandbox.local_sandbox import Sandbox, Session

TOLERANCE, NEAR_ZERO = Fraction(1, 10**6), Fraction(1, 10**9)
"""Tolerance for a wanted number with a decimal point or exponent: relative; absolute if it is
zero."""
_NUMBER = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]\d{1,3})?", re.ASCII)
"""A number as programs print it; `007` and `1e3` are text."""
_DIGITS = re.compile(r"(?<!\S)0\d+(?!\S)", re.ASCII)
_MAX_NUMBER_CHARACTERS = 400


def same_output(printed: str, wanted: str) -> bool:
    """Compare lines word by word, without white space at their ends and empty lines at the end;
    numbers by value: `2.50` is `2.5`, and within `TOLERANCE` if the wanted number is not an
    integer. If a wanted word has leading zeros, digits are text."""
    found = [line.split() for line in printed.strip().split("\n")]
    expected = [line.split() for line in wanted.strip().split("\n")]
    if [*map(len, found)] != [*map(len, expected)]:
        return False

    are_digits = _DIGITS.search(wanted) is not None
    words = chain.from_iterable(found)
    for word, other in zip(words, chain.from_iterable(expected), strict=True):
        if word == other:
            continue
        if (are_digits and other.isdigit()) or not _same_number(word, other):
            return False

    return True


def same_value(returned: Any, wanted: Any) -> bool:
    """Equal by type and value, after conversion to JSON: a sequence, a view or an iterator is a
    list, a key of a dict is a str."""
    return _same_typed(_as_json(returned), wanted)


def _same_typed(value: Any, wanted: Any) -> bool:
    return bool(rebuilt(value, exact) == rebuilt(wanted, exact))


def _same_number(word: str, wanted: str) -> bool:
    if not all(
        len(each) <= _MAX_NUMBER_CHARACTERS and _NUMBER.fullmatch(each) for each in (word, wanted)
    ):
        return False

    # exact: large integers differ where floats do not
    found = Fraction(word)
    expected = Fraction(wanted)
    is_whole = wanted.lstrip("-").isdigit()

    return found == expected or (
        not is_whole and abs(found - expected) <= (TOLERANCE * abs(expected) or NEAR_ZERO)
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Values) and len(value.items) <= MAX_YIELDED:
        value = value.items
    if isinstance(value, list | tuple | range | deque | KeysView | ValuesView | ItemsView):
        return [_as_json(entry) for entry in value]
    if isinstance(value, Mapping):
        names = {str(key): _as_json(entry) for key, entry in value.items()}
        return names if len(names) == len(value) else value  # 1 and "1" would be one name

    return value


def _is_special(value: Any) -> bool:
    """Whether it is or contains NaN, an infinity or a complex number."""
    leaves = list[Any]()
    rebuilt(value, leaves.append)
    for leaf in leaves:
        if isinstance(leaf, complex) or (isinstance(leaf, float) and not math.isfinite(leaf)):
            return True
    return False


SHUFFLED_FROM = 8
MAX_CALLS = 1000
"""Calls of the program in one case."""
_HARNESS = inspect.getsource(assertion_process)
_SHOWN = 200
_START_S = 0.1
_NOT_PLAIN = "the test passes a value to the program that is not plain"


class Outcome(NamedTuple):
    """What became of a test case."""

    case: str
    why: str
    """The reason of a failure; empty if the program passed."""
    printed: str
    """The end of its output."""


class Stopped(Exception):
    """No further case can be run: the program cannot be loaded, or the program or the scoring has
    no time left."""


class TimedSandbox:
    """A sandbox with a time limit for scoring one response."""

    def __init__(self, sandbox: Sandbox, seconds: float) -> None:
        self._sandbox = sandbox
        self._began = time.monotonic()
        self._end = self._began + seconds
        self._used_s = 0.0

    def seconds(self) -> float:
        """Wall-clock seconds since its creation."""
        return round(time.monotonic() - self._began, 3)

    def open(self, code: str) -> Session:
        """Open a session. Raises what `Sandbox.open` and `_bounded` raise."""
        return self._sandbox.open(code, self._bounded(self._sandbox.limits))

    def run(self, code: str, stdin: str) -> RunResult:
        """Run a program and keep all of its output. Raises what `_bounded` raises."""
        limits = self._sandbox.limits
        return self._sandbox.run(
            code, stdin, self._bounded(limits._replace(output_bytes=limits.printed_bytes))
        )

    @contextmanager
    def used_by_program(self) -> Iterator[None]:
        """Inside, time counts as used by the program under test, except for the start of its
        process."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._used_s += max(time.monotonic() - began - _START_S, 0.0)

    def _bounded(self, limits: Limits) -> Limits:
        """Limits with at most the remaining time. Raises Stopped if there is none, or TimeoutError
        if the program used less than half of the elapsed time, so that it is not the program's
        fault."""
        now = time.monotonic()
        if now >= self._end and 2 * self._used_s < now - self._began:
            raise TimeoutError(
                f"{now - self._began:.1f} s were too short for its cases here: raise "
                "reward.timeout_s"
            )
        if now >= self._end:
            raise Stopped("there was no time left to run it")

        return limits._replace(wall_s=min(limits.wall_s, self._end - now))


class ProgramUnderTest:
    """The program under test: a process that starts at the first call, and again after it broke."""

    def __init__(self, box: TimedSandbox, code: str) -> None:
        self._box = box
        self.code = code
        self._session: Session | None = None
        self._num_answers = 0
        self._printed = ""
        self.was_asked = False

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function. Raises Raised, Broken, Stopped. A process that breaks after earlier
        calls may have exhausted its limits, so the call is repeated in a new one."""
        self.was_asked = True
        while True:
            session = self._process()
            try:
                with self._box.used_by_program():
                    value = session.call(name, args, kwargs)
            except Raised:
                self._num_answers += 1
                raise
            except Broken as error:
                if error.cause == "value":
                    raise

                is_first = not self._num_answers
                self._printed = _printed(session)
                self.end_process()
                if is_first and error.cause == "time":
                    raise Stopped(error.reason) from None
                if is_first:
                    raise
            else:
                self._num_answers += 1
                return value

    def printed(self) -> str:
        """The last output of the most recently called process."""
        if self._session:
            return _printed(self._session)
        return self._printed

    def end_process(self) -> None:
        """End the process: the next call goes to a new one."""
        if self._session:
            self._session.close()
        self._session = None
        self._num_answers = 0

    def _process(self) -> Session:
        if self._session is None:
            self._printed = ""
            try:
                with self._box.used_by_program():
                    self._session = self._box.open(self.code)
            except Raised as error:
                raise Stopped(f"it raised {error}") from None
            except Broken as error:
                raise Stopped(error.reason) from None

        return self._session


def run_streams(box: TimedSandbox, code: str, tests: StreamTests) -> Iterator[Outcome]:
    """Raises Stopped if the rest is not run."""
    for stdin, wanted in zip(tests.inputs, tests.outputs, strict=True):
        with box.used_by_program():
            ran = box.run(code, stdin)
        why = ""
        if ran.status == "time":
            raise Stopped("it ran out of time")

        if ran.status != "ok":
            last = ran.stderr.strip().rpartition("\n")[2][:_SHOWN]
            why = f"it ended by {ran.status}, status {ran.exit_code}: {last}"
        elif not same_output(ran.stdout, wanted):
            why = f"it printed {_short(ran.stdout)}, expected {_short(wanted)}"

        yield Outcome(f"stdin {_short(stdin)}", why, _printed(ran) if why else "")


def run_calls(program: ProgramUnderTest, tests: CallTests) -> Iterator[Outcome]:
    """Raises Stopped if the rest is not run."""
    for i in _order(program, len(tests.inputs)):
        wanted = tests.outputs[i]
        value, why = _returned(program, tests.name, tests.inputs[i], {})
        is_same = same_value(value, wanted) or (
            tests.may_be_wrapped and same_value(value, wanted[0])
        )
        if not why and not is_same:
            why = f"it returned {_short(value)}, expected {_short(wanted)}"
        shown = f"{tests.name}({', '.join(map(_short, tests.inputs[i]))})"[:_SHOWN]
        yield Outcome(shown, why, program.printed() if why else "")


def run_assertions(
    box: TimedSandbox, program: ProgramUnderTest, tests: Assertions
) -> Iterator[Outcome]:
    """Raises Stopped if the rest is not run; ValueError if the tests are at fault."""
    with closing(AssertionRunner(box)) as runner:
        for i in _order(program, len(tests.cases)):
            if literal := tests.literals[i]:
                value, why = _returned(program, literal.name, literal.args, literal.kwargs)
                if not why and not _same_typed(value, literal.wanted):
                    why = f"it returned {_short(value)}"
            else:
                why = _why_fails(runner, program, tests, i)

            yield Outcome(tests.shown[i], why, program.printed() if why else "")


def _returned(
    program: ProgramUnderTest, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, str]:
    """The result of a call, and why there is none; empty if there is one."""
    try:
        return program.call(name, args, kwargs), ""
    except Raised as error:
        return None, f"it raised {error}"
    except Broken as error:
        return None, error.reason


class AssertionRunner:
    """A process in which assertions run, apart from the program."""

    def __init__(self, box: TimedSandbox) -> None:
        self._box = box
        self._session: Session | None = None

    def step(self, name: str, *args: Any) -> list[Any]:
        """Call `begin` or `resume` of `assertion_process`. Raises what `Session.call` raises."""
        if self._session is None:
            self._session = self._box.open(_HARNESS)

        try:
            return list(self._session.call(name, args))
        except (Raised, Broken):
            self.close()
            raise

    def close(self) -> None:
        if self._session:
            self._session.close()
        self._session = None


def _order(program: ProgramUnderTest, num_cases: int) -> Iterator[int]:
    """The order of the cases, fixed for a program; each gets a new process if they are few."""
    shuffled = num_cases >= SHUFFLED_FROM
    generator = random.Random(program.code.encode("utf-8", "surrogatepass"))
    for i in generator.sample(range(num_cases), num_cases) if shuffled else range(num_cases):
        if not shuffled:
            program.end_process()
        yield i


def _why_fails(
    runner: AssertionRunner, program: ProgramUnderTest, tests: Assertions, i: int
) -> str:
    """Why the case fails; empty if it passes."""
    step = _first_step(runner, program, tests, i)
    num_fresh = SHUFFLED_FROM if len(tests.cases) < SHUFFLED_FROM else 0

    for number in range(MAX_CALLS):
        _, name, args, kwargs = step
        if number < num_fresh:
            program.end_process()

        answer: list[Any]
        try:
            value = program.call(tests.names[name], args, kwargs)
        except Raised as error:
            result = f"it raised {error}"
            answer = ["raised", error.type, error.text]
        except Broken as error:
            return error.reason
        else:
            result = f"it returned {_short(value)}"
            answer = ["value", value]
            if not tests.any_number and _is_special(value):
                return result

        try:
            step = runner.step("resume", answer)
        except NotPlain as error:  # plain alone, but not together with other values
            return f"its answer is {error}"
        except Broken as error:
            if error.cause == "value":
                return f"{result}, and then {_NOT_PLAIN}"
            return f"{result}, and the test did not end: {error}"

        if step[0] == "passed":
            return ""

        if step[0] == "failed":
            if step[1] == "AssertionError" or answer[0] == "raised":
                return result
            return f"{result}, and the test raised {': '.join(step[1:])}"

    return f"the test called it more than {MAX_CALLS} times"


def _first_step(
    runner: AssertionRunner, program: ProgramUnderTest, tests: Assertions, i: int
) -> list[Any]:
    """The first call of the program. Raises ValueError for an error before it, which is the tests'
    fault."""
    try:
        step = runner.step("begin", tests.cases[i], list(tests.names))
        if step[0] == "call":
            return step
        why = ": ".join(step[1:]) or "it does not call the program"
    except Raised as error:
        why = str(error)
    except Broken as error:
        if error.cause == "time" and program.was_asked:
            raise Stopped("there was no time left to run it") from None
        why = _NOT_PLAIN if error.cause == "value" else error.reason

    raise ValueError(f"the tests are broken: {tests.shown[i]}: {why}")


def _printed(ran: Session | RunResult) -> str:
    return (ran.stdout[-_SHOWN:] + ran.stderr[-_SHOWN:]).strip()


def _short(value: object) -> str:
    try:
        return f"{value!r:.{_SHOWN}}"
    except ValueError:  # an int with more digits than Python prints
        return "a huge number"
