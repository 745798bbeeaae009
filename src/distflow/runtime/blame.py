"""Whose fault an exception in a node is: the user's where code of theirs is in its traceback, else ours."""

import functools
import sys
import sysconfig
import traceback
from pathlib import Path

import distflow
from distflow.config.errors import UserError
from distflow.graph import BoundNode


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


def users_place(error: BaseException) -> str | None:
    """File and line of the innermost frame that is neither ours nor a library's; None where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith("/") and not _is_library(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def _is_library(file: str) -> bool:
    return file.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        str(Path(distflow.__file__).parent),
        sys.prefix,
        *(paths[kind] for kind in ("stdlib", "purelib", "platlib")),
    }
    return tuple(f"{folder}/" for folder in found)


def is_ours(node: BoundNode) -> bool:
    """Whether its function is one of this package."""
    function = node.fn
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).startswith("distflow.")
