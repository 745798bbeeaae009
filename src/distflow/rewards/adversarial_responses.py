"""Trivial responses, and which of them a reward function scores like the row's answer."""

import asyncio
import builtins
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON
from distflow.observe.sanitized_output import escape_control
from distflow.rewards.code.assertions import split_assertions
from distflow.rewards.code.case_formats import AssertTests, CallTests, StreamTests, read_tests
from distflow.rewards.extracted_answers import bare_answer
from distflow.rewards.pool.domain_pools import RewardSettings
from distflow.rewards.pool.faulty_test_functions import NO_NETWORK, TEXTS, probe_target
from distflow.rewards.pool.pool import Pool, PoolSettings, RewardPool
from distflow.rewards.reward_check import FORMS, Row, arguments_of, reply_of, right_responses
from distflow.rewards.reward_results import Score, Timeout, is_right, own_reward_result
from distflow.rewards.startup_checks import must_accept

if TYPE_CHECKING:  # it loads torch
    from distflow.rewards.router import RewardRouter

NUM_ROWS = 20
PROBE = "(probe)"
ASK_MODELS = ("judge", "model", "verifiers")
_CHANCE = 0.1  # share of the rows
_REPEATS = 50
_SHORT = 40
_LARGE = 2**18  # characters of a row's extra info, from which one response of each kind is tried

_VALUES = ("0", "1", "True", "False", "None", "[]", "{}", "A")
_NO_NUMBERS = ("nan", "inf", "-inf")
_CHOICES = "A B C D E yes no true false"
_NUMBERS = " ".join(map(str, range(-9, 1000)))
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SKELETONS = (
    r"\boxed{}",
    "####",
    "The answer is",
    "<think></think>\n<answer></answer>",
    "```python\n```",
)
_RETURNED = (
    *_VALUES[:-1],
    "''",
    "float('nan')",
    "args[0]",
    "type('All', (), {'__eq__': lambda *_: True})()",
)
_ERRORS = [
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
]
_RAISED = dict.fromkeys(["StopIteration", "IndexError", "KeyError", "AttributeError", *_ERRORS])


class Bounds(NamedTuple):
    """Time limits in seconds: for all calls of a function, for one, and for the first, which loads
    it."""

    all_s: float = math.inf
    call_s: float = math.inf
    first_s: float = math.inf


BEFORE_A_RUN = Bounds(0.5, 0.25, 3.0)


def cheap_responses(row: Row, texts: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(kind, response), none of which states the row's answer. texts: of the function's own
    source."""
    yield "empty response", ""
    if bodies := _bodies(row):
        yield from (("program that computes nothing", f"```python\n{body}\n```") for body in bodies)
        return
    forms = [*FORMS.values(), *_tagged(texts)]
    said = [("all numbers of a range", form.format(_NUMBERS)) for form in forms]
    said += [("all choices", form.format(_CHOICES)) for form in forms]
    said += [("echo of the prompt", form.format(row.prompt)) for form in forms]
    said += [
        ("value of any type", form.format(value))
        for value in (*_VALUES, *_NO_NUMBERS)
        for form in forms
    ]
    said += [
        ("form without content", text)
        for text in (*_SKELETONS, *(form.format("") for form in forms))
    ]
    plain = list(dict.fromkeys([*texts, *map(_matching, texts)]))
    repeated = [" ".join([text] * _REPEATS) for text in plain if len(text) < _SHORT]
    said += [
        ("text of the reward's source", text) for text in (*plain, "\n".join(plain), *repeated)
    ]
    answer = reply_of(row.ground_truth)
    yield from (
        each for each in said if each[1] and not (answer is not None and _says(each[1], answer))
    )


def _bodies(row: Row) -> list[str]:
    """For a row with tests: programs whose functions all return the same value, or raise."""
    try:
        tests = read_tests(row.ground_truth, row.extra_info)
        plan = split_assertions(tests) if isinstance(tests, AssertTests) else tests
    except ValueError:  # no tests, or broken ones
        return []
    if isinstance(plan, StreamTests):
        return [f"print({value})" for value in ("input()", *_VALUES)]
    names = [plan.name] if isinstance(plan, CallTests) else [*plan.names.values()]
    bodies = [*(f"return {value}" for value in _RETURNED), *(f"raise {name}" for name in _RAISED)]
    return ["\n".join(f"def {name}(*args, **kwargs): {body}" for name in names) for body in bodies]


def _says(text: str, answer: str) -> bool:
    """Whether the text is the answer, or ends with it by chance."""
    numbers = _NUMBER.findall(text)
    plain = answer.replace(",", "")
    if numbers and _NUMBER.fullmatch(plain):
        return float(numbers[-1]) == float(plain)
    return bare_answer(text).casefold().strip("().") == answer.casefold().strip("().")


def _matching(pattern: str) -> str:
    """A text that a simple regular expression matches; any other text nearly unchanged."""
    for escape, text in ((r"\\d", "1"), (r"\\s", " "), (r"\\w", "a"), (r"\\b|[\^$?+*()\\]", "")):
        pattern = re.sub(escape, text, pattern)
    return pattern


def _tagged(texts: Sequence[str]) -> list[str]:
    """Forms with the tags in the function's source."""
    return [
        f"<{tag}>{{}}</{tag}>" for tag in dict.fromkeys(re.findall(r"<(\w+)>", "\n".join(texts)))
    ]


# immutable
async def find_cheap(pool: Pool, rows: Sequence[Row], bounds: Bounds = Bounds()) -> list[str]:  # noqa: B008
    """Kinds of responses that are right, or score like the row's answer, on more rows than by
    chance: a row, a response and the scores of each. pool: has the function as `PROBE`. Raises
    UserError for one that must not be tried."""
    found = dict[str, dict[str, str]]()
    num_tried = 0
    end = math.inf

    async def score(row: Row, text: str) -> tuple[float, list[str]]:
        """The function's own accuracy, −inf if it fails, and the texts in its source."""
        began = time.monotonic()
        result = await pool.call(PROBE, arguments_of(row, text))
        took = time.monotonic() - began
        if isinstance(result, Score):
            if end < math.inf and took > bounds.call_s:
                raise UserError(f"a call takes {took:.1f} s")
            return own_reward_result(result), [
                str(text) for text in cast(list[JSON], result.extra[TEXTS])
            ]
        if bounds.call_s < math.inf and (isinstance(result, Timeout) or NO_NETWORK in str(result)):
            raise UserError(str(result))
        return -math.inf, []

    for row in rows:
        least, texts = await score(row, "")
        end = min(end, time.monotonic() + bounds.all_s)
        num_tried = num_tried + 1
        best = max([(await score(row, text))[0] for text in _right(row, texts)], default=-math.inf)
        is_large = len(repr(row.extra_info)) > _LARGE
        tried = set[str]()
        for kind, text in cheap_responses(row, texts):
            if time.monotonic() > end:
                break
            if is_large and kind in tried:  # each call sends the whole row
                continue
            tried.add(kind)
            value, _ = await score(row, text)
            if is_right(value) or value >= best > least:
                like = f", the row's answer {best:g}" if best > -math.inf else ""
                shown = f"{kind}, {escape_control(repr(text), 80)}, got {value:g}{like}"
                found.setdefault(kind, {}).setdefault(row.origin, shown)
    often = [rows_of for rows_of in found.values() if len(rows_of) > _CHANCE * num_tried]
    return [
        escape_control(": ".join(next(iter(rows_of.items()))), one_line=True) for rows_of in often
    ]


def _right(row: Row, texts: Sequence[str]) -> list[str]:
    answer = None if _bodies(row) else reply_of(row.ground_truth)
    tagged = [form.format(answer) for form in _tagged(texts) if answer is not None]
    return [*(each.text for each in right_responses(answer, row.response)), *tagged]


async def notes_of(
    router: "RewardRouter",
    settings: RewardSettings,
    rows: Sequence[Row],
    bounds: Bounds = BEFORE_A_RUN,
) -> list[tuple[str, str]]:
    """(kind, message) of notes on each reward function of the rows' domains that compares with an
    answer. It is tried in a separate process without a network: a user's may keep state, or call a
    paid endpoint."""

    async def note(domain: str, name: str) -> tuple[str, str] | None:
        what = f"reward function '{name}' (domain '{domain}')"
        functions = {PROBE: probe_target(settings.targets(domain)[name], network=False)}
        try:
            if name in ASK_MODELS:
                raise UserError("it asks a model")
            pool = await asyncio.to_thread(
                RewardPool, PoolSettings(functions, 1, bounds.first_s, settings.memory_bytes)
            )
            try:
                lines = await find_cheap(
                    pool, [row for row in rows if row.domain == domain], bounds
                )
            finally:
                await asyncio.to_thread(pool.close)
        except UserError as why:
            return "info", f"{what} is not tried on responses that do no work: {why}"
        return (
            ("warning", "\n  ".join([f"{what} scores responses that do no work:", *lines]))
            if lines
            else None
        )

    domains = dict.fromkeys(row.domain for row in rows)
    parts = [
        (domain, part.name)
        for domain in domains
        for part in router.functions_of(domain)
        if part.weight > 0
    ]
    tried = [
        note(domain, name) for domain, name in parts if name in ASK_MODELS or must_accept(name)
    ]
    return [found for found in await asyncio.gather(*tried) if found]
