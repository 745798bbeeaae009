"""Whose fault an exception in a node is: the user's where code of theirs is in its traceback, else ours."""

from distflow.config.errors import UserError
from distflow.config.places import users_place
from distflow.graph import BoundNode
from distflow.graph.functions import innermost

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
