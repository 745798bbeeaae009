"""Policies of checkpoints: exported as a Hugging Face folder (`distflow.json` names the source), and copied into the
run that starts from one, so that it can resume without the other run."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from distflow.config import Config, Loaded, config_of_run
from distflow.errors import UserError
from distflow.launch.code_trust import model_code, only_if_trusted, without_model_code
from distflow.launch.model_sources import copy_weights, load_policy, tokenizer_loader
from distflow.models.export import check_target, export_model
from distflow.observe.crash_safe_files import read_object
from distflow.runtime.checkpoint.checkpoint_store import Checkpoint
from distflow.runtime.checkpoint.files import MANIFEST, checkpoints_in
from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS, describe_choice, is_of_a_run, policy_checkpoint
from distflow.training.engine import TrainState

NOTE = "distflow.json"
MODELS = "models"

Say = Callable[[str], None]


def export_checkpoint(source: Path, target: Path, *, trust_code: bool = False, say: Say = lambda line: None) -> Path:
    """Write the policy of a run's folder (its latest checkpoint) or of one checkpoint; adapters are merged. Where the
    target holds the same already, nothing is done.

    trust_code: Python code that came with the model may run, where the run's config let it; `say` is called with that
    code, and with the step. Raises UserError where there is no whole checkpoint, the target is taken, or such code is
    not trusted.
    """
    checkpoint = policy_checkpoint(source)
    note = {"run": str(source), "step": checkpoint.step, "checkpoint": identity(checkpoint)}
    say(describe_choice(checkpoint, source))
    if read_object(target / NOTE).get("checkpoint") == note["checkpoint"]:
        say(f"{target} holds it already")
        return target
    check_target(target)
    with checkpoint.reading():
        config = config_of_run(checkpoint.load("run")["config"])
        trained = TrainState(checkpoint.load("actor")).trained_weights()
    code = model_code(config)
    only_if_trusted(code, trust_code, say)
    if not code:
        config = without_model_code(config)
    model = load_policy(config, torch.device("cpu"))  # the machine that trained may have had another
    if unknown := copy_weights(trained, model):
        raise UserError(
            f"{source} was made from another model: its '{unknown}' is no weight of the model, or of another shape"
        )
    export_model(model, tokenizer_loader(config)(), target, note=(NOTE, note))
    say(f"exported to {target}")
    return target


def identity(checkpoint: Checkpoint) -> str:
    """Identifies a checkpoint: its manifest has the checksums of all its parts."""
    return hashlib.sha256((checkpoint.path / MANIFEST).read_bytes()).hexdigest()


def with_models_of_runs(loaded: Loaded, say: Say) -> Loaded:
    """The config with a model's folder, `models/...` of the run's own, in place of each run or checkpoint that it names
    as a model.

    A resumed run uses the copy that it began from. `say` is called with a description. Raises UserError as
    `export_checkpoint`.
    """
    config, settings = loaded.config, loaded.config.actor_rollout_ref
    model = replace(
        settings.model,
        path=_folder(settings.model.path, config, say),
        tokenizer_path=_folder(settings.model.tokenizer_path, config, say),
    )
    critic = replace(config.critic.model, path=_folder(config.critic.model.path, config, say))
    if (model, critic) == (settings.model, config.critic.model):
        return loaded
    config = replace(
        config,
        actor_rollout_ref=replace(settings, model=model),
        critic=replace(config.critic, model=critic),
    )
    return replace(loaded, config=config)


def write_config_of(run: Path, file: Path) -> Path:
    """The config of a run or checkpoint as YAML, with its policy as the model. Raises UserError where there is none."""
    if (run / "config.json").is_file():
        raise UserError(
            f"{run} is a model: say how it is asked, with distflow eval PRESET actor_rollout_ref.model.path={run}"
        )
    checkpoint = policy_checkpoint(run)
    with checkpoint.reading():
        values = dict(checkpoint.load("run")["config"])
        values["actor_rollout_ref"]["model"]["path"] = str(run)
    file.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return file


def _folder(path: str | None, config: Config, say: Say) -> str | None:
    if path is None or not is_of_a_run(path):
        return path
    copies, run_dir = config.trainer.run_dir / MODELS, config.trainer.run_dir
    anew = config.trainer.resume_mode == "never" or not checkpoints_in(run_dir / CHECKPOINTS)
    kept = [note.parent for note in copies.glob(f"*/{NOTE}") if read_object(note).get("run") == path]
    if kept and not anew:
        copy = max(kept, key=lambda folder: folder.stat().st_mtime)
        say(f"model: the copy of {path} that this run began from, {copy}")
        return str(copy)
    copies.mkdir(mode=0o700, exist_ok=True)
    source = Path(path)
    checkpoint = policy_checkpoint(source)
    say(f"model: {describe_choice(checkpoint, source)}")
    target = copies / f"{checkpoint.path.name}-{identity(checkpoint)[:8]}"
    trusted = config.actor_rollout_ref.model.trust_remote_code
    return str(export_checkpoint(source, target, trust_code=trusted))
