"""The reward check: a reward function is called with responses that are known to be right or wrong.

Right ones are a row's ground truth in every form (box, phrase, ...), wrong ones are variations that
`math` does not call equal to it. Forms of which the function reads at most half are not tried
further.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

from distflow.builtin_names import is_own
from distflow.errors import UserError
from distflow.import_target import line_of, split_name
from distflow.rewards.extracted_answers import bare_answer, decoded
from distflow.rewards.function_calls import PROMPT, call_arguments
from distflow.rewards.function_loading import reads_ground_truth, target_of
from distflow.rewards.pool.domain_pools import (
    DEFAULT_DOMAIN,
    RewardSettings,
    borrowed,
    functions_of,
    pool_settings,
)
from distflow.rewards.pool.pool import RewardPool
from distflow.rewards.reward_results import (
    ACC,
    RewardResult,
    Score,
    Timeout,
    scored_right,
    why,
)

OWN = "own response"
FORMS: Mapping[str, str] = {
    "box": r"So it is \boxed{{{}}}.",
    "phrase": "The answer is {}.",
    "hashes": "That makes it.\n#### {}",
    "alone": "{}",
    "tags": "<think>\nThat makes it.\n</think>\n<answer>{}</answer>",
}
"""Forms of writing an answer, by name."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

HOSTILE: tuple[str, ...] = (
    "x" * 2**20,
    r"\boxed{" * 20_000,
    "(" * 50_000,
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{1e999999999}",
    r"\boxed{\binom{10^9}{10^8}}",
    r"\boxed{__import__('os')}",
    "\x00\x1b[31m\ufffd",
    "\ud800",
    r"\boxed{}" * 1000,
    "#### " * 10_000,
)
"""Responses that are wrong for any prompt: huge, deeply nested, costly to compute, not text."""

WARNING = "warning: "
"""How a line of the first calls begins that the run's records keep."""
WRONG = "I do not know."
"""The wrong response of the first calls."""


class Response(NamedTuple):
    """A response to a row, of which it is known whether it is right."""

    kind: str
    """How the answer was changed."""
    form: str
    """The name of the form in which it is written, or ''."""
    text: str
    is_right: bool = False


def right_responses(answer: str | None, response: str | None) -> Iterator[Response]:
    """The row's answer in every form, and its own response, if it has them."""
    if answer is not None:
        for form, template in FORMS.items():
            yield Response("right answer", form, template.format(answer), is_right=True)
    if response is not None:
        yield Response("right answer", OWN, response, is_right=True)


def wrong_responses(answer: str, others: Sequence[str], form: str) -> Iterator[Response]:
    """Wrong answers in that form. others: answers of other rows."""
    template = FORMS[form]
    other = next((text for text in others if not are_same(answer, text)), None)
    for kind, text in _wrong_answers(answer, other):
        yield Response(kind, form, template.format(text))
    yield Response("empty answer", form, template.format(""))

    if other is not None:
        text = f"It is not {answer}, as I thought. {template.format(other)}"
        yield Response("answer named, another given", form, text)


def _wrong_answers(answer: str, other: str | None) -> Iterator[tuple[str, str]]:
    if other is not None:
        yield "another row's answer", other
        yield "both answers", f"{answer} or {other}"
        yield "both answers", f"{other}, {answer}"

    if _NUMBER.fullmatch(answer):
        yield "a digit changed", answer[:-1] + str((int(answer[-1]) + 1) % 10)
        if answer.strip("-0.,"):
            yield (
                "another sign",
                answer.removeprefix("-") if answer.startswith("-") else f"-{answer}",
            )
            yield "a digit more", f"{answer}1" if "." in answer else f"{answer}0"


def reply_of(ground_truth: object) -> str | None:
    """A row's ground truth as text that fits into a box; None if it is not text, like the tests of
    a program."""
    first = ground_truth
    if isinstance(ground_truth, list | tuple) and ground_truth:
        first = ground_truth[0]

    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return bare_answer(str(first)) or None


def are_same(answer: str, other: str) -> bool:
    """Whether two answers are the same, also mathematically."""
    # sympy: half a second, which no start should wait
    from distflow.rewards.math.reward import gold_answer, is_equal

    try:
        return is_equal(gold_answer(answer), other)
    except (ValueError, RecursionError):  # not an answer for `math`
        return answer.split() == other.split()


_ROWS_TRIED = 8
_TRIED_WITHIN_S = 3.0
_LONGEST_ANSWER = 200

ScoreOne = Callable[["Row", str], Awaitable[RewardResult]]


async def find_unread_answers(score: ScoreOne, rows: Sequence["Row"]) -> str:
    """A sentence that the function counts the own answer of none of the first rows as right; empty
    if it does, if it scores one above another answer in the same form, if rows have no answers that
    a response can give, or if the calls take longer than `_TRIED_WITHIN_S`."""
    deadline = time.monotonic() + _TRIED_WITHIN_S
    known = list[tuple[Row, str]]()
    for row in rows[:_ROWS_TRIED]:
        answer = _short_answer(row.ground_truth)
        if answer:
            known.append((row, answer))

    if not known:
        return ""

    for row, answer in known:
        other = next((text for _, text in known if text != answer), None)
        different = next((text for _, text in _wrong_answers(answer, other)), WRONG)

        for template in FORMS.values():
            if time.monotonic() > deadline:
                return ""

            own = await score(row, template.format(answer))
            wrong = await score(row, template.format(different))
            if not isinstance(own, Score) or not isinstance(wrong, Score):
                return ""
            if scored_right(own) or own.value > wrong.value:
                return ""

    row, answer = known[0]
    return (
        f"counts none of {len(known)} rows' own answers as right, in none of the forms "
        f"{', '.join(FORMS)}: for example the answer {_typed(row.ground_truth)} of {row.origin}, "
        f"given as the response {_typed(answer)}; compare values of the same type, and take the "
        "answer alone from the response"
    )


def _short_answer(truth: object) -> str | None:
    """A ground truth as an answer that a response can give; None for others, such as tests of a
    program."""
    answer = str(truth) if isinstance(truth, bool) else reply_of(truth)
    if (
        answer is None
        or "\n" in answer
        or len(answer) > _LONGEST_ANSWER
        or isinstance(decoded(answer), dict)
    ):
        return None
    if re.search(r"\bassert\b|\bdef \w+\(", answer):
        return None

    return answer


def _typed(value: object) -> str:
    shown = repr(value)
    if len(shown) > 90:
        shown = f"{shown[:50]} … {shown[-30:]}"
    return f"{shown} ({type(value).__name__})"


HOSTILE_KIND = "hostile text"
_NEIGHBOURS = 5
_MOST_HANGS = 4


class Row(NamedTuple):
    """A row of a data set."""

    origin: str
    """Its file and line."""
    domain: str
    ground_truth: object
    extra_info: Mapping[str, object]
    response: str | None = None
    """The data set's own, which is right."""
    prompt: str = ""


class Fault(NamedTuple):
    """A response that did not get its score."""

    origin: str
    """File and line of the row."""
    ground_truth: object
    response: str
    said: str
    """The score or reward error."""


@dataclass
class Kind:
    """Results for the responses of one kind."""

    is_right: bool
    asked: int = 0
    wrong: list[Fault] = field(default_factory=list)
    """Wrong ones scored as right, or the other way round."""
    errors: list[Fault] = field(default_factory=list)
    timeouts: list[Fault] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return len(self.wrong) + len(self.errors) + len(self.timeouts)


@dataclass
class CheckResult:
    """What a reward function does with right and wrong responses."""

    answers: int = 0
    """Rows with an answer that can be written."""
    read: Counter[str] = field(default_factory=Counter)
    """How many of them were found, by form."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """By name."""
    seconds: list[float] = field(default_factory=list)
    """Of each call."""
    num_hangs: int = 0
    """Calls that timed out; `_MOST_HANGS` of them end the check if they are half of all."""

    @property
    def hangs(self) -> bool:
        return self.num_hangs >= max(_MOST_HANGS, len(self.seconds) / 2)

    def forms(self) -> list[str]:
        """The forms that the reward function reads."""
        return [form for form in self.read if 2 * self.read[form] > self.answers]

    @property
    def num_faults(self) -> int:
        """False negatives and positives, errors and hangs together."""
        return sum(kind.num_faults for kind in self.kinds.values())


_Request = tuple[Row, Response]
_Answered = tuple[Row, Response, RewardResult]


async def check_reward(
    pool: RewardPool, name: str, rows: Sequence[Row], num_workers: int
) -> CheckResult:
    """Call the pool's function `name` with right answers in each form, then with wrong ones in the
    forms that it reads and with hostile texts. num_workers: of the pool; as many calls run at a
    time, so that each can be timed."""
    result = CheckResult()
    free = asyncio.Semaphore(num_workers)
    answers = [reply_of(row.ground_truth) for row in rows]
    known = [(row, answer) for row, answer in zip(rows, answers, strict=True) if answer is not None]
    result.answers = len(known) or sum(row.response is not None for row in rows)

    async def ask(row: Row, response: Response) -> _Answered | None:
        async with free:
            if result.hangs:
                return None

            started = time.perf_counter()
            reward_result = await pool.call(name, arguments_of(row, response.text))
            result.seconds.append(time.perf_counter() - started)
            result.num_hangs += isinstance(reward_result, Timeout)
            return row, response, reward_result

    async def ask_all(requests: Iterable[_Request]) -> list[_Answered]:
        return [*filter(None, await asyncio.gather(*starmap(ask, requests)))]

    right: list[_Request] = []
    for row, answer in zip(rows, answers, strict=True):
        for response in right_responses(answer, row.response):
            right.append((row, response))

    answered = await ask_all(right)
    result.read.update({response.form: 0 for _, response in right})
    result.read.update(
        response.form for _, response, reward_result in answered if scored_right(reward_result)
    )

    if result.hangs:
        forms = list(result.read)
    else:
        forms = result.forms() or list(result.read)[:1]

    _count(result, [entry for entry in answered if entry[1].form in forms])

    wrong = _wrong_requests(known, [form for form in forms if form in FORMS])
    wrong += [(row, Response("empty response", "", "")) for row in rows]
    wrong += [(rows[0], Response(HOSTILE_KIND, "", text)) for text in HOSTILE]
    _count(result, await ask_all(wrong))

    return result


def _wrong_requests(known: Sequence[tuple[Row, str]], forms: Sequence[str]) -> list[_Request]:
    """Wrong responses to each row, in each form, of which some are the answers of other rows."""
    requests: list[_Request] = []
    texts = [answer for _, answer in known]
    for number, (row, answer) in enumerate(known):
        neighbours = (texts[number + 1 :] + texts[:number])[:_NEIGHBOURS]
        for form in forms:
            requests += [(row, each) for each in wrong_responses(answer, neighbours, form)]

    return requests


def _count(result: CheckResult, answered: Iterable[_Answered]) -> None:
    for row, response, reward_result in answered:
        kind = result.kinds.setdefault(response.kind, Kind(response.is_right))
        kind.asked += 1
        fault = Fault(row.origin, row.ground_truth, response.text, why(reward_result))

        if isinstance(reward_result, Timeout):
            kind.timeouts.append(fault)
        elif not isinstance(reward_result, Score):
            kind.errors.append(fault)
        elif scored_right(reward_result) != response.is_right:
            kind.wrong.append(fault)


def arguments_of(row: Row, response: str) -> dict[str, object]:
    """Arguments of a call of a pool for that response to the row."""
    return {
        PROMPT: row.prompt,
        **call_arguments(row.domain, response, row.ground_truth, row.extra_info),
    }


def call_first(settings: RewardSettings, rows: Iterable[Row]) -> list[str]:
    """Call each of the user's functions on the first row of its domain, with the row's ground truth
    as the response and with a wrong response, and if the row's own answer does not count as right,
    on a few more. Returns notes on scores that are odd. Raises UserError where the first row gives
    no score within the function's deadline."""
    notes = list[str]()
    by_domain: dict[str, list[Row]] = {}
    for row in rows:
        by_domain.setdefault(row.domain, []).append(row)

    for domain, own_rows in by_domain.items():
        names = [part.name for part in functions_of(settings.functions, domain)]
        users = [name for name in names if is_own(name)]
        if not users:
            continue

        key = DEFAULT_DOMAIN
        if domain in settings.patience_by_domain():
            key = domain

        with borrowed(pool_settings(settings)[key]) as pool, ThreadPoolExecutor(1) as thread:
            for name in users:
                calls = _first_calls(pool, name, own_rows, target_of(name, settings.custom))
                # On a thread, since the caller's may run an event loop, as a notebook's does.
                notes += thread.submit(asyncio.run, calls).result()

    return notes


async def _first_calls(pool: RewardPool, name: str, rows: Sequence[Row], target: str) -> list[str]:
    row = rows[0]
    answer = reply_of(row.ground_truth)
    responses = [answer or str(row.ground_truth), WRONG]
    asked = [arguments_of(row, response) for response in responses]

    if name in pool.takes_batches:
        parts = [asked]
    else:
        parts = [[each] for each in asked]

    scores = list[Score]()
    for part in parts:
        for result in await pool.score_group(name, part):
            if not isinstance(result, Score):
                raise UserError(_no_score(target, row, responses[len(scores)], result))
            scores.append(result)

    right, wrong = scores

    async def score(row: Row, response: str) -> RewardResult:
        return await pool.call(name, arguments_of(row, response))

    who = f"the reward function {split_name(target)[1]}"
    notes = list[str]()
    if not scored_right(right) or right.value <= wrong.value:
        fault = await find_unread_answers(score, rows)
        if fault and reads_ground_truth(target):
            notes.append(f"{WARNING}{who} {fault}")

    if scored_right(wrong) and answer is not None:
        kind = "an acc" if ACC in wrong.extra else "a score"
        notes.append(
            f"note: {who} gives {kind} of {why(wrong)} for {WRONG!r}: {kind} of 1 or more counts "
            'as correct; return {"score": ..., "acc": 0 or 1}'
        )

    return notes


def _no_score(target: str, row: Row, response: str, result: RewardResult) -> str:
    path, name = split_name(target)
    if line := line_of(path, name):
        place = f"{path}, line {line}"
    else:
        place = path

    if isinstance(result, Timeout):
        what = f"{result} (reward.timeout_s): it hangs, or is slow"
    else:
        what = str(result)

    tried = f"a wrong response ({response!r}; its score should be 0)"
    if response != WRONG:
        is_null = "(it is null: see data.answer_key) " * (row.ground_truth is None)
        tried = f"the row's ground truth {is_null}as the response ({response!r:.80})"

    return (
        f"the reward function {name} ({place}) returns no score for the first row ({row.origin}) "
        f"with {tried}: {what}. Correct it, and test it with `distflow reward check`; "
        "trust.check_rewards=false skips this call"
    )
