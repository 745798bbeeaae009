"""What a checkpoint holds besides weights, and how a run goes on from it."""

import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from distflow.config import changed_keys, config_from_dict, to_dict
from distflow.config.errors import UserError
from distflow.data import generators
from distflow.data.batch import Batch
from distflow.models.magnitude import magnitudes, unsound
from distflow.runtime.checkpoint import Checkpoint
from distflow.runtime.checkpoint_folder import CheckpointError
from distflow.runtime.context import NodeState
from distflow.runtime.ports.edge import Live, Released
from distflow.runtime.resources import Resources
from distflow.runtime.resume import as_list, ways_to_start
from distflow.runtime.spec import Spec
from distflow.training.engine import TrainState


def saved_parts(spec: Spec, resources: Resources, released: Released, state: NodeState) -> Iterator[tuple[str, object]]:
    """The parts of a checkpoint by name: tensors, or values that JSON can hold."""
    meta = {}
    for role, engine in resources.trained().items():
        saved = engine.state()
        meta[role] = saved.meta
        yield role, saved.tensors
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    yield "rng", {"torch": torch.get_rng_state(), **{f"cuda.{i}": state for i, state in enumerate(cuda)}}
    if released.live.batch is not None:
        yield "live", released.live.batch.to_tensors()
    yield (
        "run",
        {
            "config": to_dict(spec.config),
            "facts": {**spec.facts, **resources.facts},
            "coordinator": released.cut,
            "live_measured": {str(number): list(parts) for number, parts in released.live.measured.items()},
            "engines": meta,
            "nodes": state,
            "rng": {"python": random.getstate(), "numpy": _numpy_state()},
        },
    )


def check_same_config(checkpoint: Checkpoint, spec: Spec, allowed: tuple[str, ...]) -> None:
    """Raises UserError naming every key that must not differ, and all ways out."""
    with checkpoint.reading():
        before = config_from_dict(checkpoint.load("run")["config"], judge=False)
    changed = [c for c in changed_keys(before, spec.config) if c[0] not in allowed]
    if not changed:
        return
    shown = "\n".join(f"  {key}: {then!r} then, {now!r} now" for key, then, now in changed)
    flags = " ".join(f"--allow-change {key}" for key, *_ in changed)
    ways = {"to go on as before": "set them back", "to go on with the change": flags, **ways_to_start(spec)}
    raise UserError(f"{checkpoint.path} was made with another config:\n{shown}\n{as_list(ways)}")


def check_same_facts(checkpoint: Checkpoint, spec: Spec, facts: Mapping[str, object]) -> list[str]:
    """What differs without harm, as lines for the user. Raises UserError naming what must not."""
    with checkpoint.reading():
        before_facts = dict(checkpoint.load("run")["facts"])
    notes = []
    for name, now in facts.items():
        before = before_facts.get(name, now)
        if now == before:
            continue
        if name.endswith("fingerprint"):
            raise UserError(
                f"{checkpoint.path} was made with another {name.removesuffix('_fingerprint')}: rows, tokens or "
                f"the reference would not be the same.\n{as_list({'to go on': 'restore it', **ways_to_start(spec)})}"
            )
        notes.append(f"{name} was {before} in the checkpoint and is {now} now: the run is not bit-equal from here on")
    return notes


def restore(checkpoint: Checkpoint, resources: Resources) -> tuple[NodeState, Live]:
    """Load weights and optimizer state; returns what the nodes keep, and the groups on the edge.

    Raises CheckpointError where it holds something else, or weights that training does not make of the model's own.
    """
    with checkpoint.reading():
        run = checkpoint.load("run")
        for role, engine in resources.trained().items():
            state = TrainState(checkpoint.load(role), run["engines"][role])
            _refuse_garbage(checkpoint, role, engine.state(), state)
            engine.load_state(state)
        batch = Batch.from_tensors(checkpoint.load("live")) if "live" in checkpoint.parts else None
        measured = {int(number): [(m, w) for m, w in parts] for number, parts in run["live_measured"].items()}
        return run["nodes"], Live(batch, measured)


def set_generators(checkpoint: Checkpoint | None, seed: int) -> None:
    """Give the global random generators the states of the checkpoint; at a run's start those of its seed.

    Last of all before the run goes on: modules and programs of the user may seed them while they are loaded.
    """
    generators.seed("run", seed)
    if checkpoint is None:
        return
    saved, tensors = checkpoint.load("run")["rng"], checkpoint.load("rng")
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if f"cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)


def _refuse_garbage(checkpoint: Checkpoint, role: str, now: TrainState, saved: TrainState) -> None:
    start, found = (magnitudes(state.trained_weights().items()) for state in (now, saved))
    wrong = unsound(found, start)
    if wrong:
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} holds garbage: of the {role}'s weights {wrong[0]}, {len(wrong)} tensors "
            "in all. Go on from an earlier one with --resume PATH, or start anew with --resume never"
        )


def _numpy_state() -> list[object]:
    name, keys, *rest = np.random.get_state()
    return [name, np.asarray(keys).tolist(), *rest]
