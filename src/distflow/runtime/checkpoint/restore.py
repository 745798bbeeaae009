"""How a run resumes from a checkpoint."""

import random
from collections.abc import Mapping

import numpy as np
import torch

from distflow.config import Config, changed_keys, config_from_dict
from distflow.config.keys.schema import diff, schema_keys, show_value
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import UserError, allow_change_advice
from distflow.observe.run_reader import VALIDATION_ROWS
from distflow.runtime.checkpoint.checkpoint_store import Checkpoint
from distflow.runtime.checkpoint.files import is_sharded
from distflow.runtime.checkpoint.find_checkpoint import as_list, ways_to_start
from distflow.runtime.checkpoint.saved_parts import part_of_rank
from distflow.runtime.node_context import NodeState
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.group import finished_group, rows_by_group
from distflow.runtime.sample_queue.protocol import FinishedGroup
from distflow.runtime.spec import Spec
from distflow.scheduling.scheduler_snapshot import restored
from distflow.training.engine import TrainState


def check_same_config(checkpoint: Checkpoint, spec: Spec, allowed: tuple[str, ...]) -> None:
    """Raises UserError with every key that must not differ, and the available options."""
    with checkpoint.reading():
        before = config_from_dict(checkpoint.load("run")["config"], judge=False)
    changed = [c for c in changed_keys(before, spec.config) if c[0] not in allowed]
    if not changed:
        return

    infos = schema_keys()
    ways = {"to resume as before": "set them back"}
    shown = "\n".join(
        f"  {key}: {show_value(infos[key], then)} then, {show_value(infos[key], now)} now"
        for key, then, now in changed
    )
    if "dag.pipeline" not in (key for key, *_ in changed):
        ways["to resume with the change"] = allow_change_advice([key for key, *_ in changed])
    ways |= ways_to_start(spec)
    raise UserError(f"{checkpoint.path} was saved with another config:\n{shown}\n{as_list(ways)}")


def check_same_facts(checkpoint: Checkpoint, spec: Spec, facts: Mapping[str, object]) -> list[str]:
    """Harmless differences, as lines for the user. Raises UserError for those that are not
    allowed."""
    with checkpoint.reading():
        saved = checkpoint.load("run")
        before_facts = dict(saved["facts"])
        config = config_from_dict(saved["config"], judge=False)

    notes = []
    for name, now in facts.items():
        before = before_facts.get(name, now)
        if now == before:
            continue

        if name.endswith("fingerprint"):
            raise _other_input(name.removesuffix("_fingerprint"), checkpoint, config, spec)

        if name == VALIDATION_ROWS:
            what = "the validation rows differ from the checkpoint's"
            notes.append(f"{what}: accuracies before and after cannot be compared")
            continue

        notes.append(
            f"{name} was {before} in the checkpoint and is {now} now: the run is not bit-equal "
            "from here on"
        )

    return notes


def _other_input(what: str, checkpoint: Checkpoint, before: Config, spec: Spec) -> UserError:
    """The error for another model, tokenizer or data, with the keys that tell the difference.
    before: the checkpoint's config."""
    other = f"a different {what}"
    group = "actor_rollout_ref.model."
    if what == "data":
        other = "different data"
        group = "data."

    lines = [f"{checkpoint.path} was saved with {other}:"]
    for key, then, here in diff(before, spec.config):
        if key.startswith(group):
            lines.append(f"  {key}: {then!r} then, {here!r} now")

    if len(lines) == 1:
        lines.append("  the keys are the same: files that they name have changed")
    lines.append(as_list({"to resume": "restore it", **ways_to_start(spec)}))
    return UserError("\n".join(lines))


def restore(checkpoint: Checkpoint, resources: Resources) -> NodeState:
    """Load weights and optimizer state; returns the state of the nodes.

    If an engine's state is sharded, each rank loads its own shards, regardless of how many ranks
    saved them.

    Raises CheckpointError for unexpected content.
    """
    with checkpoint.reading():
        run = checkpoint.load("run")
        for role, engine in resources.trained().items():
            now = engine.state()
            layout = now.layout if is_sharded(now.tensors) else None
            tensors = checkpoint.load(role, layout)
            engine.load_state(TrainState(tensors, checkpoint.load(f"{role}_meta")))

        nodes: NodeState = run["nodes"]
        return nodes


def load_queued(checkpoint: Checkpoint) -> dict[int, FinishedGroup[Batch]]:
    """The complete groups that were queued, by group id. Raises CheckpointError for unexpected
    content."""
    if "live" not in checkpoint.files:
        return {}

    with checkpoint.reading():
        saved = checkpoint.load("run")
        measured = {
            int(number): [(m, w) for m, w in parts]
            for number, parts in saved["live_measured"].items()
        }
        prompt_groups = {
            each.group_id: each for each in map(restored, saved["coordinator"]["live"])
        }
        batch = Batch.from_tensors(checkpoint.load("live"))
        return {
            number: finished_group(
                prompt_groups[number], batch.select(own), measured.get(number, ())
            )
            for number, own in rows_by_group(batch).items()
        }


def set_generators(checkpoint: Checkpoint | None, seed: int, rank: int = 0) -> None:
    """Set the global random generators to the states that this rank saved, or to the seed at a
    run's start.

    rank: among the training ranks. If the checkpoint lacks it, because the run had fewer ranks, it
    is seeded with the run's seed, the step and its number. Call this last before the run continues:
    a user's modules and pipelines may seed the generators when loaded.
    """
    step = checkpoint.step if checkpoint else 0
    own = (step, rank) if rank else ()
    global_random_states.seed("run", seed, *own)
    if checkpoint is None or (rank and part_of_rank(rank) not in checkpoint.files):
        return

    with checkpoint.reading():
        states = checkpoint.load(part_of_rank(rank))
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        device = global_random_states.device_module()
        saved = states["device"]
        for i, state in enumerate(saved[: device.device_count()] if device else ()):
            device.set_rng_state(torch.tensor(state, dtype=torch.uint8), i)
