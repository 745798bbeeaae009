"""Refuses a run whose checkpoints do not fit on the disk before it trains, instead of at a save."""

import os
from collections.abc import Collection
from math import ceil
from pathlib import Path

from distflow.config import Config
from distflow.errors import UserError, count_of
from distflow.launch.configured_models import model_sizes
from distflow.planning.model_memory import trained_bytes
from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS
from distflow.runtime.spec import Spec

_EXPORTED_BYTES = 2  # at least, of a weight in a Hugging Face folder


def check_disk(spec: Spec) -> None:
    """Raises UserError if the disk of the run's folder has no room for the checkpoints that are
    there at once."""
    keep_last = spec.keep_last
    if keep_last is None:  # the run saves none
        return

    size = checkpoint_bytes(spec.config, spec.pipeline().engines)
    kept = keep_last + (spec.keep_best is not None)
    at_once = min(kept + 1, _most_saves(spec))  # a new one is complete before an old one goes
    free = _free_bytes(spec.run_dir)
    if at_once * size <= free:
        return

    raise UserError(
        f"the disk is too small: a checkpoint takes {size / 1e9:.3g} GB (weights and optimizer), "
        f"and {count_of(at_once, 'checkpoint')} may be there at once "
        f"(trainer.keep_last={keep_last}), but {spec.run_dir} has {free / 1e9:.3g} GB free: free "
        "space, set trainer.default_local_dir to another disk, lower trainer.keep_last, or save "
        "nothing with trainer.save_freq=-1"
    )


def checkpoint_bytes(config: Config, engines: Collection[str]) -> float:
    """At least, of one checkpoint: what is trained, with its optimizer state. An adapter takes next
    to nothing."""
    total = 0.0
    settings = config.actor_rollout_ref
    trained = {"actor": settings.actor.optim, "critic": config.critic.optim}

    for role, size in model_sizes(config, trained.keys() & engines).items():
        if role == "actor" and settings.model.lora_rank:
            continue

        optim = trained[role]
        stored = trained_bytes(size, size, optim.optimizer)
        total += stored["weights"] + stored["optimizer"]
        if role == "actor" and config.trainer.save_hf_model:
            total += _EXPORTED_BYTES * size

    return total


def _most_saves(spec: Spec) -> int:
    """The most checkpoints that the run writes, with that of its end."""
    saves = spec.data.saves
    steps = spec.data.total_steps
    by_steps_alone = saves.steps > 0 and saves.epochs is None and saves.secs is None
    if by_steps_alone:
        return max(1, ceil(steps / saves.steps))
    return max(1, steps)


def _free_bytes(run_dir: Path) -> int:
    """What the run may write, over its own earlier checkpoints, which go as new ones come."""
    folder = next(
        path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir()
    )
    disk = os.statvfs(folder)
    existing = sum(
        file.stat().st_size for file in (run_dir / CHECKPOINTS).glob("*/*") if file.is_file()
    )

    return disk.f_bavail * disk.f_frsize + existing
