"""Whose fault an exception in a node is: the user's where code of theirs is in its traceback, else ours.

Writing to a run's folder: a disk that is full or refuses, or a file in the way, is the user's to mend.

Verdicts that failed: told, and above some share the end of the run, before anything is learned from the rest.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distflow.errors import UserError, users_place
from distflow.graph import BoundNode
from distflow.graph.fields import innermost
from distflow.observe.sanitize import visible
from distflow.rewards.call_counts import RewardCallCounts

REPAIR_ADVICE = (
    "Repair the function that is named (custom_reward_function.path, reward.functions, dag), or the answers that it is "
    "given (data.answer_key); if it is slow, raise reward.timeout_s"
)


class NodeError(RuntimeError):
    """A node raised, or returned something that is no output of it."""


class UserNodeError(NodeError, UserError):
    """The same, in a function that the user wrote."""


class BadOutput(ValueError):
    """What a node function returned is no output of it. The message goes on from the node's name."""


def node_error(node: BoundNode, error: BaseException) -> NodeError:
    """What `error`, which the node raised, is told as: with the node's name and the user's line that it came from."""
    said = f"node '{node.node_id}' raised {type(error).__name__}: {error}"
    place = users_place(error)
    return UserNodeError(f"{said} (at {place})") if place else NodeError(said)


def output_error(node: BoundNode, what: str) -> NodeError:
    """The node returned something that is no output of it."""
    return (NodeError if is_ours(node) else UserNodeError)(f"node '{node.node_id}' {what}")


def is_ours(node: BoundNode) -> bool:
    """Whether its function is one of this package."""
    return str(getattr(innermost(node.fn), "__module__", "")).startswith("distflow.")


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG)


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Raises UserError for such a disk; what was written before it is whole."""
    try:
        yield
    except OSError as err:
        if err.errno not in (*_DISK, *_IN_THE_WAY):
            raise
        what = f"{err.strerror}: {err.filename}" if err.filename else str(err.strerror)
        raise UserError(
            f"the run's folder {run_dir} cannot be written ({what}). Checkpoints that it holds are whole. Free space, "
            "move away what is in the way, or set trainer.default_local_dir to another folder; then start again"
        ) from err


WARN_ABOVE = 0.05
_SHOWN_CHARACTERS = 500


class TooManyErrors(UserError):
    """More of a step's verdicts failed than `reward.max_error_rate` allows."""


@dataclass
class ErrorShare:
    """Judges the verdicts of each step. What lasts is told once, and again when the share has doubled.

    show: given why a verdict failed, in every step where one did.
    """

    max_share: float
    warn: Callable[[str], None]
    show: Callable[[str], None] = lambda reason: None
    _told: float = field(default=0.0, init=False)

    def step(self, calls: RewardCallCounts, step: int) -> dict[str, float]:
        """After all verdicts of a step, dropped groups' too; its metrics. step: from 1. Raises TooManyErrors."""
        if calls.first:
            self.show(calls.first)
        if calls.share > self.max_share:
            raise TooManyErrors(
                f"{described(calls)} at step {step}, more than reward.max_error_rate={self.max_share:g} allows: "
                f"what is left is chance. {_first(calls)}\n{REPAIR_ADVICE}; reward.max_error_rate=1 never stops"
            )
        if calls.share <= WARN_ABOVE:
            self._told = 0.0
        elif calls.share >= 2 * self._told:
            self._told = calls.share
            self.warn(
                f"{described(calls)} at step {step}; such answers are left out of the training. {_first(calls)}\n"
                f"{REPAIR_ADVICE}. Above reward.max_error_rate={self.max_share:g} the run stops"
            )
        if not calls.asked:
            return {}
        return {"reward/calls": float(calls.asked), "reward/error_rate": calls.share}


def warn_of_errors(calls: RewardCallCounts, warn: Callable[[str], None]) -> None:
    """After a validation, in which such answers count as wrong."""
    if calls.share > WARN_ABOVE:
        warn(f"{described(calls)} in a validation, and count as wrong. {_first(calls)}\n{REPAIR_ADVICE}")


def described(calls: RewardCallCounts) -> str:
    return f"{calls.failed:,} of {calls.asked:,} verdicts failed ({calls.share:.0%})"


def _first(calls: RewardCallCounts) -> str:
    return f"The first said: {visible(calls.first, _SHOWN_CHARACTERS, one_line=True)}"
