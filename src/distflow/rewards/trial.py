"""A reward is tried on responses of which it is known whether they are right: what it calls otherwise, and how long.

A form in which it finds more than half of the answers is one that it reads; only in those it is asked for more.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distflow.rewards.correctness import is_right, own_verdict
from distflow.rewards.functions import PROMPT
from distflow.rewards.perturb import FORMS, HOSTILE, Response, answer_of, right_responses, wrong_responses
from distflow.rewards.pool import VerifierPool
from distflow.rewards.solutions import why
from distflow.rewards.verdict import Score, Timeout, Verdict

HOSTILE_KIND = "hostile text"
_NEIGHBOURS = 5


class Row(NamedTuple):
    """response: of the data set, known to be right; or None."""

    origin: str
    domain: str
    ground_truth: object
    extra_info: Mapping[str, object]
    response: str | None = None
    prompt: str = ""


class Fault(NamedTuple):
    """origin: file and line of the row. said: the verdict."""

    origin: str
    ground_truth: object
    response: str
    said: str


@dataclass
class Kind:
    """What became of the responses of one kind. wrong: called right though they are wrong, or the other way round."""

    is_right: bool
    asked: int = 0
    wrong: list[Fault] = field(default_factory=list)
    errors: list[Fault] = field(default_factory=list)
    timeouts: list[Fault] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return len(self.wrong) + len(self.errors) + len(self.timeouts)


@dataclass
class Trial:
    """answers: rows whose answer can be written down. read: by form, how many of them were found.

    kinds: by name. seconds: of each verdict.
    """

    answers: int = 0
    read: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Kind] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def forms(self) -> list[str]:
        """Those that the reward reads."""
        return [form for form in self.read if 2 * self.read[form] > self.answers]

    @property
    def num_faults(self) -> int:
        """False negatives and positives, errors and hangs together."""
        return sum(kind.num_faults for kind in self.kinds.values())


async def try_reward(pool: VerifierPool, name: str, rows: Sequence[Row], num_workers: int) -> Trial:
    """Ask the pool's function `name`: right answers in each form, then wrong ones in the forms that it reads, and what
    is hostile. num_workers: of the pool; so many verdicts are waited for at a time, which is how each is timed."""
    trial, free = Trial(), asyncio.Semaphore(num_workers)
    answers = [answer_of(row.ground_truth) for row in rows]
    known = [(row, answer) for row, answer in zip(rows, answers, strict=True) if answer is not None]
    trial.answers = len(known) or sum(row.response is not None for row in rows)

    async def ask(row: Row, response: Response) -> tuple[Row, Response, Verdict]:
        async with free:
            started = time.perf_counter()
            verdict = await pool.judge(name, arguments_of(row, response.text))
            trial.seconds.append(time.perf_counter() - started)
            return row, response, verdict

    right = [
        (row, response)
        for row, answer in zip(rows, answers, strict=True)
        for response in right_responses(answer, row.response)
    ]
    answered = await asyncio.gather(*(ask(*asked) for asked in right))
    trial.read.update({response.form: 0 for _, response in right})
    trial.read.update(response.form for _, response, verdict in answered if _is_right(verdict))
    forms = trial.forms() or list(trial.read)[:1]
    _count(trial, [entry for entry in answered if entry[1].form in forms])

    texts = [answer for _, answer in known]
    wrong = [
        (row, response)
        for number, (row, answer) in enumerate(known)
        for form in forms
        if form in FORMS
        for response in wrong_responses(answer, (texts[number + 1 :] + texts[:number])[:_NEIGHBOURS], form)
    ]
    wrong += [(row, Response("empty response", "", "")) for row in rows]
    wrong += [(rows[0], Response(HOSTILE_KIND, "", text)) for text in HOSTILE]
    _count(trial, await asyncio.gather(*(ask(*asked) for asked in wrong)))
    return trial


def _count(trial: Trial, answered: Iterable[tuple[Row, Response, Verdict]]) -> None:
    for row, response, verdict in answered:
        kind = trial.kinds.setdefault(response.kind, Kind(response.is_right))
        kind.asked += 1
        fault = Fault(row.origin, row.ground_truth, response.text, why(verdict))
        if isinstance(verdict, Timeout):
            kind.timeouts.append(fault)
        elif not isinstance(verdict, Score):
            kind.errors.append(fault)
        elif _is_right(verdict) != response.is_right:
            kind.wrong.append(fault)


def _is_right(verdict: Verdict) -> bool:
    return isinstance(verdict, Score) and is_right(own_verdict(verdict))


def arguments_of(row: Row, response: str) -> dict[str, object]:
    """What a pool is asked about that response to the row."""
    return {
        PROMPT: row.prompt,
        "data_source": row.domain,
        "solution_str": response,
        "ground_truth": row.ground_truth,
        "extra_info": row.extra_info,
    }
