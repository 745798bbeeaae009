"""Errors of a run: in a node (a user's error if user code is in the traceback, else ours), in
writing to the run's folder (for the user to fix), and of groups.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distflow.errors import UserError, users_place
from distflow.graph import BoundNode
from distflow.import_target import innermost, is_ours, shown_name
from distflow.observe.metrics import TIMED_OUT
from distflow.rewards.reward_results import OF_WORKFLOW

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
            "its ground truths (data.answer_key)"
        )

    if "APIConnectionError" in first:
        what += ". An agent makes its client inside its function: only there its base URL is set"

    is_late = re.search(rf"{TIMED_OUT} \d|within [\d.]+ s \(reward\.timeout_s", first)
    if is_late:
        return f"{what}; if it is slow, raise reward.timeout_s"
    return what


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
    if place:
        return UserNodeError(f"{said} (at {place})")

    return NodeError(said)


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
            "Free space, move conflicting files away, or set trainer.default_local_dir to another "
            "folder; then rerun the command"
        ) from err


class NoProgress(RuntimeError):
    """Every group fails: continuing would only use up the data."""


class UserNoProgress(NoProgress, UserError):
    """The same, if the user's functions or their time limit fail every group."""


@dataclass(frozen=True)
class Failure:
    """Why a group failed."""

    message: str
    users: bool
    """Whether the user has to fix it."""
