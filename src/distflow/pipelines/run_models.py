"""Runs as models: a run that begins from another's policy keeps a copy of it, so that it can go on whatever becomes of
that run."""

from dataclasses import replace
from pathlib import Path

import yaml

from distflow.config import Config, Loaded
from distflow.config.errors import UserError
from distflow.observe.jsonlines import read_object
from distflow.pipelines.export import NOTE, Say, export_checkpoint, identity
from distflow.runtime.checkpoint_folder import checkpoints_in
from distflow.runtime.policy import described, is_of_a_run, policy_checkpoint
from distflow.runtime.resume import CHECKPOINTS

MODELS = "models"


def with_models_of_runs(loaded: Loaded, say: Say) -> Loaded:
    """The config with a model's folder, `models/...` of the run's own, in place of each run or checkpoint that it names
    as a model.

    A run that goes on takes the copy that it began from; what it is is told by `say`. Raises UserError as
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
    say(f"model: {described(checkpoint, source)}")
    target = copies / f"{checkpoint.path.name}-{identity(checkpoint)[:8]}"
    trusted = config.actor_rollout_ref.model.trust_remote_code
    return str(export_checkpoint(source, target, trust_code=trusted))
