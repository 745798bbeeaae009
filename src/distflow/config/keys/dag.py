"""Keys of `dag`: the pipeline, its policies, and its placement."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from distflow.builtin_names import PIPELINES
from distflow.config.compose.typed_values import (
    Differing,
    Mismatch,
    did_you_mean,
    parse_differing,
    plain_differing,
    show,
)
from distflow.config.keys.actor_rollout_ref import ActorRolloutRefConfig
from distflow.config.keys.declare import collect, key

NODE_KEYS = (
    "id",
    "type",
    "role",
    "func",
    "deps",
    "options",
    "only_forward_compute",
    "config",
    "engine",
    "writes",
    "scope",
    "plane",
    "phase",
    "validates",
    "retry_limit",
    "policy",
)
WITHOUT_FUNC = ("PUT_TO_BUFFER", "GET_FROM_BUFFER", "BARRIER_SYNC", "DATA_LOAD", "ENV_INTERACT")
"""Types of nodes that need no func."""


def parse_pipeline(value: object) -> str | tuple[dict[str, object], ...] | None:
    """A name, or nodes written in YAML. Raises Mismatch for an entry without an id, or without a
    func that its type needs."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise Mismatch(
            f"is {show(value)}, neither a name nor a list of nodes",
            f"write one of {', '.join(PIPELINES)}, module:function, file.py:function, or nodes as "
            "- {id: ..., func: module:function, deps: [...]}",
        )

    seen: set[str] = set()
    for place, node in enumerate(value, start=1):
        _check_node(place, node, seen)
    return tuple(dict(node) for node in value)


FIRST_POLICY = "actor"
"""The policy of `actor_rollout_ref`; `dag.policies` names the others."""


def parse_policies(value: object) -> Differing:
    """Policies by name from plain data. Raises Mismatch."""
    form = "write e.g. {policy_b: {model: {path: DIR}, actor: {optim: {lr: 1e-5}}}}"
    keys = collect(ActorRolloutRefConfig())

    def advice(policy: str, key: str) -> str:
        return f"{did_you_mean(key, keys)}its keys are those of actor_rollout_ref; {form}"

    found = parse_differing(value, keys, form, advice, of="policy")
    for name in found:
        if name == FIRST_POLICY or not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            other = f"choose another word; '{FIRST_POLICY}' is the policy of actor_rollout_ref"
            raise Mismatch(f"has a policy '{name}'", other)

    return found


@dataclass(frozen=True)
class DagConfig:
    """The pipeline to run, and its placement on devices."""

    pipeline: str | tuple[dict[str, object], ...] | None = key(
        None,
        (
            f"{', '.join(PIPELINES)}, your module:function or file.py:function, or nodes; null: by "
            "adv_estimator"
        ),
        parse=parse_pipeline,
    )
    generates: bool | None = key(
        None,
        "whether your own pipeline generates its data; null infers it from its nodes",
        taken_by="custom",
    )
    policies: Differing = key(
        {},
        (
            "name → keys of actor_rollout_ref that differ: additional policies, of paths of the "
            "graph or of rollout.agents"
        ),
        parse=parse_policies,
        plain=lambda policies: plain_differing(policies, collect(ActorRolloutRefConfig())),
    )
    policy: str | None = key(
        None, "the policy that this run trains; null: a run for each, if there are dag.policies"
    )
    enable_perf: bool = key(False, "measure the time of each node")
    backend_threshold: int = key(
        32,
        "ranks from which objects use gloo in addition to nccl (GPUs)",
        minimum=1,
        taken_by="several_processes",
    )
    apportion_strategy: str = key(
        "param_aware",
        "divide devices over all parts by model size or evenly",
        choices=("param_aware", "even"),
        taken_by="several_parts",
    )
    model_sizes: dict[str, str | float] = key(
        {},
        (
            "model sizes for param_aware by role, e.g. {actor: 70B, critic: 500M}; default: from "
            "config.json"
        ),
        taken_by="several_parts",
    )
    consider_node_cohesion: bool = key(
        True, "keep a part on one machine if it fits", taken_by=("several_parts", "allocation")
    )
    consider_node_load: bool = key(
        True,
        "among equally suitable machines, prefer the one with fewer busy devices",
        taken_by=("several_parts", "allocation"),
    )


def _check_node(place: int, node: object, seen: set[str]) -> None:
    if not isinstance(node, Mapping):
        raise Mismatch(
            f"has {node!r} as entry {place}, not a mapping", f"its keys are {', '.join(NODE_KEYS)}"
        )

    kind = str(node.get("type")).removeprefix("NodeType.").upper()
    needed = ("id",) if "func" not in node and kind in WITHOUT_FUNC else ("id", "func")

    wrong = [name for name in node if name not in NODE_KEYS]
    if wrong or not all(isinstance(node.get(name), str) for name in needed):
        if wrong:
            named = f"the unknown key '{wrong[0]}'"
        else:
            named = f"no {' or '.join(needed)}"

        raise Mismatch(
            f"has an entry {place} with {named}",
            f"the keys of a node are {', '.join(NODE_KEYS)} (siiRL's node_id, executable_ref and "
            "dependencies are id, func and deps); what its function takes goes under options",
        )
    if node["id"] in seen:
        raise Mismatch(
            f"has two nodes with the id '{node['id']}'", "give each node an id of its own"
        )

    seen.add(node["id"])
