"""The enums of nodes and the tables that hang on them: engines and config groups by role."""

from enum import Enum
from typing import Literal


class NodeType(Enum):
    """What kind of work a node does.

    `MODEL_INFERENCE` and `MODEL_TRAIN` use an engine: those that the function names, else the one of the node's role.
    `PUT_TO_BUFFER`, `GET_FROM_BUFFER` force an exchange and `BARRIER_SYNC` is a barrier over the ranks; they need no
    function, run in the learning plane, and are the identity in one process.
    """

    COMPUTE = "COMPUTE"
    DATA_LOAD = "DATA_LOAD"
    ENV_INTERACT = "ENV_INTERACT"
    MODEL_INFERENCE = "MODEL_INFERENCE"
    MODEL_TRAIN = "MODEL_TRAIN"
    PUT_TO_BUFFER = "PUT_TO_BUFFER"
    GET_FROM_BUFFER = "GET_FROM_BUFFER"
    BARRIER_SYNC = "BARRIER_SYNC"
    CUSTOM = "CUSTOM"


class NodeRole(Enum):
    """Whom a node works for: it decides the config group that the node receives."""

    DEFAULT = "DEFAULT"
    ACTOR = "ACTOR"
    ADVANTAGE = "ADVANTAGE"
    CRITIC = "CRITIC"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    DYNAMIC_SAMPLING = "DYNAMIC_SAMPLING"


class NodeStatus(Enum):
    """How far a node is in one step. Kept by the worker, never in the graph."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


Scope = Literal["sample", "group", "global"]
SCOPES: tuple[Scope, ...] = ("sample", "group", "global")

MARKER_TYPES = (NodeType.PUT_TO_BUFFER, NodeType.GET_FROM_BUFFER, NodeType.BARRIER_SYNC)
ENGINE_TYPES = (NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN)

TRAIN_ENGINES = ("actor", "critic", "ref", "reward_model")
ENGINES = (*TRAIN_ENGINES, "rollout")
ROLE_ENGINE = {
    NodeRole.ACTOR: "actor",
    NodeRole.CRITIC: "critic",
    NodeRole.REFERENCE: "ref",
    NodeRole.ROLLOUT: "rollout",
    NodeRole.REWARD: "reward_model",
}

# The dotted key of the config group that a node of the role receives; "" is the whole config.
ROLE_GROUP = {
    NodeRole.DEFAULT: "",
    NodeRole.ACTOR: "actor_rollout_ref.actor",
    NodeRole.ROLLOUT: "actor_rollout_ref.rollout",
    NodeRole.REFERENCE: "actor_rollout_ref.ref",
    NodeRole.CRITIC: "critic",
    NodeRole.ADVANTAGE: "algorithm",
    NodeRole.REWARD: "reward",
    NodeRole.DYNAMIC_SAMPLING: "algorithm.filter_groups",
}
