"""What a checkpoint holds besides weights, and how a run goes on from it."""

import random
from typing import Any

import numpy as np
import torch

from distflow.config import changed_keys, config_from_dict, to_dict
from distflow.config.errors import UserError
from distflow.flow.coordinator import Coordinator
from distflow.runtime.checkpoint import Checkpoint
from distflow.runtime.parts import Parts
from distflow.training.engine import TrainState

NodeState = dict[str, dict[str, Any]]
"""JSON values of each node by its id: they live across steps and are in every checkpoint."""


def saved_parts(parts: Parts, coordinator: Coordinator, node_state: NodeState) -> dict[str, Any]:
    """The parts of a checkpoint by name: tensors, or values that JSON can hold."""
    tensors: dict[str, Any] = {"rng": {"torch": torch.get_rng_state()}}
    meta = {}
    for role, engine in parts.engines.trained().items():
        state = engine.state()
        tensors[role] = state.tensors
        meta[role] = state.meta
    run = {
        "config": to_dict(parts.config),
        "facts": dict(parts.facts),
        "coordinator": coordinator.snapshot(),
        "engines": meta,
        "nodes": node_state,
        "rng": {"python": random.getstate(), "numpy": _numpy_state()},
    }
    return {**tensors, "run": run}


def check_same_run(checkpoint: Checkpoint, parts: Parts, allowed: tuple[str, ...]) -> list[str]:
    """What differs without harm, as lines for the user. Raises UserError naming every key or fact that must not."""
    run = checkpoint.load("run")
    changed = [
        c for c in changed_keys(config_from_dict(run["config"], judge=False), parts.config) if c[0] not in allowed
    ]
    if changed:
        shown = "\n".join(f"  {key}: {then!r} then, {now!r} now" for key, then, now in changed)
        raise UserError(
            f"{checkpoint.path} was made with another config:\n{shown}\n"
            "Set them back, allow one with --allow-change KEY, or start anew with --resume never and another "
            "trainer.default_local_dir"
        )
    notes = []
    for name, before in run["facts"].items():
        now = parts.facts.get(name)
        if now == before:
            continue
        if name.endswith("fingerprint"):
            raise UserError(
                f"{checkpoint.path} was made with another {name.removesuffix('_fingerprint')}: rows, tokens or "
                "the reference would not be the same. Restore it, or start anew with --resume never"
            )
        notes.append(f"{name} was {before} in the checkpoint and is {now} now: the run is not bit-equal from here on")
    return notes


def restore_engines(checkpoint: Checkpoint, parts: Parts) -> NodeState:
    """Load weights, optimizer state and random state; returns what the nodes keep."""
    run = checkpoint.load("run")
    for role, engine in parts.engines.trained().items():
        engine.load_state(TrainState(checkpoint.load(role), run["engines"][role]))
    torch.set_rng_state(checkpoint.load("rng")["torch"])
    version, internal, gauss = run["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = run["rng"]["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    nodes: NodeState = run["nodes"]
    return nodes


def _numpy_state() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [name, np.asarray(keys).tolist(), *rest]
