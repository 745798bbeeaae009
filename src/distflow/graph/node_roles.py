"""The types, roles and scopes of nodes, and the defaults of each role."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class NodeType(Enum):
    """What kind of work a node does.

    `MODEL_INFERENCE` and `MODEL_TRAIN` use an engine: those that the function names, else the one
    of the node's role. `BARRIER_SYNC` is a barrier over the ranks that run the node.
    `PUT_TO_BUFFER` and `GET_FROM_BUFFER` mark a reshard and change nothing: the plan decides where
    one is needed. These three need no function, and run in the training loop. Without a function, a
    `DATA_LOAD` node names the data set, and an `ENV_INTERACT` node runs episodes of a workflow, by
    default `environment`: their options are keys of the config. The other types only describe a
    node, as do these two with a function.
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
    """The role of a node, which gives its defaults: see `ROLE_DEFAULTS`."""

    DEFAULT = "DEFAULT"
    ACTOR = "ACTOR"
    ADVANTAGE = "ADVANTAGE"
    CRITIC = "CRITIC"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    DYNAMIC_SAMPLING = "DYNAMIC_SAMPLING"


Scope = Literal["sample", "group", "global"]
SCOPES: tuple[Scope, ...] = ("sample", "group", "global")
Plane = Literal["rollout", "training"]

MARKER_TYPES = (NodeType.PUT_TO_BUFFER, NodeType.GET_FROM_BUFFER, NodeType.BARRIER_SYNC)
CONFIGURING_TYPES = (NodeType.DATA_LOAD, NodeType.ENV_INTERACT)
"""Types of nodes whose options are keys of the config if they have no function."""
ENGINE_TYPES = (NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN)

ENGINES = ("actor", "critic", "ref", "reward_model", "rollout")
"""Engines that a parameter may name; `add_node(engine=...)` selects any other. All except `rollout`
work on whole steps."""
SERVICES = ("reward_fn", "tokenizer")
"""What a worker passes, besides engines, to the parameter of that name."""

SCORE_FIELDS = ("token_level_scores", "token_level_rewards")


@dataclass(frozen=True)
class RoleDefaults:
    """Defaults of a node's fields; a field that is set in `Node` takes precedence."""

    config: str
    engine: str | None = None
    writes: tuple[str, ...] = ()
    scope: Scope | None = None
    plane: Plane | None = None
    phase: str | None = None
    forward_phase: str | None = None
    validates: bool = False


ROLE_DEFAULTS = {
    NodeRole.DEFAULT: RoleDefaults(""),
    NodeRole.ACTOR: RoleDefaults(
        "actor_rollout_ref.actor", "actor", phase="train_step", forward_phase="recompute_logp"
    ),
    NodeRole.ROLLOUT: RoleDefaults("actor_rollout_ref.rollout", "rollout", validates=True),
    NodeRole.REFERENCE: RoleDefaults(
        "actor_rollout_ref.ref", "ref", phase="ref_logp", forward_phase="ref_logp"
    ),
    NodeRole.CRITIC: RoleDefaults(
        "critic", "critic", phase="train_critic", forward_phase="compute_value"
    ),
    NodeRole.ADVANTAGE: RoleDefaults(
        "algorithm", writes=("advantages", "returns"), phase="compute_advantage"
    ),
    NodeRole.REWARD: RoleDefaults("reward", "reward_model", SCORE_FIELDS, "group", validates=True),
    NodeRole.DYNAMIC_SAMPLING: RoleDefaults(
        "algorithm.filter_groups", scope="group", plane="rollout"
    ),
}
