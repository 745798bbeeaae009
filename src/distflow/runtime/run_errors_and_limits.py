"""Errors of a run: in a node (a user's error if user code is in the traceback, else ours), and in
writing to the run's folder (for the user to fix); reward errors, which are reported, and above some
rate end the run before the step is trained on; and groups that fail one after another, which end
the run before it uses up its data.
"""

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distflow.errors import UserError, users_place
from distflow.graph import BoundNode
from distflow.import_target import innermost, is_ours, shown_name
from distflow.observe.metrics import TIMED_OUT
from distflow.observe.sanitized_output import escape_control
from distflow.rewards.reward_results import OF_WORKFLOW, RewardCounts

WARN_ABOVE = 0.05
_SHOWN_CHARACTERS = 500

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_IN_THE_WAY = (
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


def repair_advice(first: str) -> str:
    """What to do about failures of the user's functions. first: the message of the first, which
    begins with who failed; it is a text, since errors are stored with their samples."""
    what = "Correct the workflow (actor_rollout_ref.rollout.workflow, .workflow_kwargs)"
    if not first.startswith(OF_WORKFLOW):
        what = (
            "Correct the named function (custom_reward_function.path, reward.functions, dag), or "
            "its ground truths "
            "(data.answer_key)"
        )
    is_late = re.search(rf"{TIMED_OUT} \d|within [\d.]+ s \(reward\.timeout_s", first)
    return f"{what}; if it is slow, raise reward.timeout_s" if is_late else what


class NodeError(RuntimeError):
    """A node raised, or returned something that is not a valid output."""


class UserNodeError(NodeError, UserError):
    """A NodeError in a function that the user wrote."""


class BadOutput(ValueError):
    """A node function returned something invalid. The message follows the node's name."""


def node_error(node: BoundNode, error: BaseException) -> NodeError:
    """The error that reports a node's `error`, with the node's name and the user's line that raised
    it."""
    if isinstance(error, BadOutput):
        return output_error(node, str(error))
    said = f"node '{node.node_id}' raised {type(error).__name__}: {error}"
    place = users_place(error)
    return UserNodeError(f"{said} (at {place})") if place else NodeError(said)


def output_error(node: BoundNode, what: str) -> NodeError:
    if is_ours(node.fn):
        return NodeError(f"node '{node.node_id}' {what}")
    return UserNodeError(
        f"node '{node.node_id}' {what}; its function is {shown_name(innermost(node.fn))}"
    )


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Raises UserError if the disk is full or rejects writes, or a file is in the way; earlier
    files are complete."""
    try:
        yield
    except OSError as err:
        if err.errno not in (*_DISK, *_IN_THE_WAY):
            raise
        what = f"{err.strerror}: {err.filename}" if err.filename else str(err.strerror)
        raise UserError(
            f"the run's folder {run_dir} cannot be written ({what}). Its checkpoints are complete. "
            "Free space, "
            "move conflicting files away, or set trainer.default_local_dir to another folder; then "
            "rerun the command"
        ) from err


class TooManyErrors(UserError):
    """A step has more reward errors than `reward.max_error_rate` allows."""


@dataclass
class ErrorShare:
    """Checks the share of reward errors in each step. Warns once, and again whenever the share has
    doubled; and once of each key whose values cannot be stored.

    show: called with a reward error, in every step that has one.
    """

    max_share: float
    warn: Callable[[str], None]
    show: Callable[[str], None] = lambda reason: None
    _warned_share: float = field(default=0.0, init=False)
    _as_text: set[str] = field(default_factory=set, init=False)

    def step(self, calls: RewardCounts, step: int) -> dict[str, float]:
        """A step's metrics after all its reward calls, also of dropped groups. step: from 1. Raises
        TooManyErrors."""
        if calls.first:
            self.show(calls.first)
        warn_of_texts(
            {key: kind for key, kind in calls.as_text.items() if key not in self._as_text},
            self.warn,
        )
        self._as_text.update(calls.as_text)
        if calls.share > self.max_share:
            raise TooManyErrors(
                f"{described(calls)} at step {step}, more than "
                f"reward.max_error_rate={self.max_share:g} allows: "
                f"the remaining samples are not representative. {_first(calls)}\n"
                f"{repair_advice(calls.first)}; reward.max_error_rate=1 never stops"
            )
        if calls.share <= WARN_ABOVE:
            self._warned_share = 0.0
        elif calls.share >= 2 * self._warned_share:
            self._warned_share = calls.share
            self.warn(
                f"{described(calls)} at step {step}; such responses are excluded from training. "
                f"{_first(calls)}\n"
                f"{repair_advice(calls.first)}. Above reward.max_error_rate={self.max_share:g} the "
                "run stops"
            )
        if not calls.asked:
            return {}
        return {"reward/calls": float(calls.asked), "reward/error_rate": calls.share}


def warn_of_errors(calls: RewardCounts, warn: Callable[[str], None]) -> None:
    """Warn after a validation, in which responses with reward errors count as wrong."""
    if calls.share > WARN_ABOVE:
        warn(
            f"{described(calls)} in a validation, and count as wrong. {_first(calls)}\n"
            f"{repair_advice(calls.first)}"
        )


def warn_of_texts(as_text: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Warn of values beside scores of which samples have only a text. as_text: their types by
    PART/KEY."""
    for key, kind in sorted(as_text.items()):
        warn(
            f"'{escape_control(key, _SHOWN_CHARACTERS, one_line=True)}', returned beside a score, "
            "has a value of type "
            f"{kind}, of which the samples have only a text: return numbers below 2^63, bools, "
            "texts, None, lists or "
            "mappings of them"
        )


def described(calls: RewardCounts) -> str:
    return f"{calls.failed:,} of {calls.asked:,} scores are reward errors ({calls.share:.0%})"


def _first(calls: RewardCounts) -> str:
    return f"The first error was: {escape_control(calls.first, _SHOWN_CHARACTERS, one_line=True)}"


class NoProgress(RuntimeError):
    """Every group fails: continuing would only use up the data."""


class UserNoProgress(NoProgress, UserError):
    """The same, if the user's functions or their time limit fail every group."""


@dataclass(frozen=True)
class Failure:
    """Why a group failed. users: whether the user has to fix it."""

    message: str
    users: bool


@dataclass
class GroupFailures:
    """Warns of the first failing group, and whenever their number has doubled."""

    warn: Callable[[str], None]
    _number: int = field(default=0, init=False)

    def add(self, group_id: int, failure: Failure) -> None:
        self._number += 1
        if self._number & (self._number - 1):
            return
        then = "dropped" if failure.users else "generated again, unless this was its third attempt"
        message = escape_control(failure.message, _SHOWN_CHARACTERS)
        self.warn(
            f"group {group_id} has failed (failures so far: {self._number}) and is {then}: "
            f"{message}"
        )


class FailuresInARow:
    """Failures without a successful group in between. consumer_batch: groups per step."""

    def __init__(self, consumer_batch: int) -> None:
        self._consumer_batch = consumer_batch
        self._failures: list[Failure] = []

    @property
    def last(self) -> str | None:
        return self._failures[-1].message if self._failures else None

    def count(self, failure: Failure | None) -> None:
        """failure: None for a success, which resets the count. Raises NoProgress after two steps'
        worth of failures."""
        if failure is None:
            self._failures.clear()
            return
        self._failures.append(failure)
        self.refuse(of_steps=2)

    def refuse(self, of_steps: int) -> None:
        """Raises NoProgress if the failures would have filled this many steps."""
        if len(self._failures) < of_steps * self._consumer_batch:
            return
        first = self._failures[0]
        message = (
            f"the last {len(self._failures)} prompt groups all failed, so the run cannot progress; "
            "the first error: "
            f"{first.message}"
        )
        raise (
            UserNoProgress(f"{message}\n{repair_advice(first.message)}")
            if first.users
            else NoProgress(message)
        )
