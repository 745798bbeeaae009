"""Replies and errors of calls to a run's actors: Ray's, or processes of the local launcher, which
are called by a `Peer`."""

from concurrent.futures import Future
from contextlib import suppress
from typing import Any

REPLIES_WITHIN_S = 60.0
STARTS_WITHIN_S = 300.0
ENDS_WITHIN_S = 20.0
STARVED_S = 10.0
"""How long a busy machine may take to report a death, or that others are late too."""
COORDINATOR = -1
"""In place of a rank."""


class WorkerDied(RuntimeError):
    """A worker's process is gone: the run ends, and resumes from its last checkpoint when started
    again."""

    exit_status = 75  # EX_TEMPFAIL of sysexits(3): the job of `slurm.sbatch` is requeued


class WorkerHangs(WorkerDied):
    """A worker's process is alive, but does not reach the collective call in which the other ranks
    wait."""


class PeersLate(RuntimeError):
    """Another rank did not reach a collective call in time."""


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, not because of the user's input."""


def name_of(number: int) -> str:
    """The process's name in messages. number: a rank, or COORDINATOR."""
    if number == COORDINATOR:
        return "the coordinator"
    return f"worker {number}"


def future_of(ref: Any) -> "Future[Any]":
    """A future of the result of an actor's call."""
    return ref if isinstance(ref, Future) else ref.future()


def reply(ref: Any) -> Any:
    """Wait for the result of an actor's call. Raises what the actor raised."""
    if isinstance(ref, Future):
        return ref.result()

    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as err:
        raise err.cause from err


def reply_of(ref: Any, number: int) -> Any:
    """The reply of the Ray actor of a rank, or of the coordinator. Raises WorkerDied if it is gone
    or unresponsive."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(ref, timeout=REPLIES_WITHIN_S)
    except (RayActorError, GetTimeoutError) as err:
        raise WorkerDied(
            f"{name_of(number)}'s process is gone or does not reply ({type(err).__name__})."
        ) from err


def kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # Ray itself may have failed
        ray.kill(actor)
