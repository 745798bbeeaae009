"""distflow: RL post-training of language models as a typed dataflow graph. Importing it loads neither torch nor Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distflow.algorithms import AdvantageEstimator, register_adv_est, register_policy_loss
    from distflow.graph import (
        Drop,
        NodeOutput,
        NodeRole,
        NodeType,
        Pipeline,
        PipelineError,
        TaskGraph,
        node,
        register_field,
    )

__version__ = "0.1.0"

__all__ = [
    "AdvantageEstimator",
    "Drop",
    "NodeOutput",
    "NodeRole",
    "NodeType",
    "Pipeline",
    "PipelineError",
    "TaskGraph",
    "node",
    "register_adv_est",
    "register_field",
    "register_policy_loss",
]

_FROM_ALGORITHMS = ("AdvantageEstimator", "register_adv_est", "register_policy_loss")


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for (PEP 562): those of the algorithms load torch."""
    if name not in __all__:
        raise AttributeError(f"module 'distflow' has no attribute '{name}'")
    room = "distflow.algorithms" if name in _FROM_ALGORITHMS else "distflow.graph"
    return getattr(import_module(room), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
