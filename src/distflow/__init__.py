"""distflow: RL post-training of language models as a typed dataflow graph. Importing it loads
neither torch nor Ray."""

from importlib import import_module

TYPE_CHECKING = False  # instead of `typing`'s, which would be imported before Ctrl-C is handled
if TYPE_CHECKING:
    from typing import Any

    from distflow.algorithms import AdvantageEstimator, register_adv_est, register_policy_loss
    from distflow.api.load_run import Run, load_run
    from distflow.api.own_training_loop import Rollouts, rollouts
    from distflow.api.train import train, train_several
    from distflow.environments import Chat, Reply, Row, workflow
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
    from distflow.observe.findings.step_rules import register_doctor_rule

__version__ = "0.1.0"

__all__ = [
    "AdvantageEstimator",
    "Chat",
    "Drop",
    "NodeOutput",
    "NodeRole",
    "NodeType",
    "Pipeline",
    "PipelineError",
    "Reply",
    "Rollouts",
    "Row",
    "Run",
    "TaskGraph",
    "load_run",
    "node",
    "register_adv_est",
    "register_doctor_rule",
    "register_field",
    "register_policy_loss",
    "rollouts",
    "train",
    "train_several",
    "workflow",
]

_ROOMS = {
    "distflow.algorithms": ("AdvantageEstimator", "register_adv_est", "register_policy_loss"),
    "distflow.api.load_run": ("Run", "load_run"),
    "distflow.api.own_training_loop": ("Rollouts", "rollouts"),
    "distflow.api.train": ("train", "train_several"),
    "distflow.observe.findings.step_rules": ("register_doctor_rule",),
    "distflow.environments": ("Chat", "Reply", "Row", "workflow"),
}


def __getattr__(name: str) -> "Any":
    """The public names, imported on first use (PEP 562), since those of the algorithms load
    torch."""
    if name not in __all__:
        raise AttributeError(f"module 'distflow' has no attribute '{name}'")
    room = next((room for room, names in _ROOMS.items() if name in names), "distflow.graph")
    return getattr(import_module(room), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
