"""Exports policies of checkpoints as Hugging Face folders (`distflow.json` names the source), with
adapters merged or alone, by command or beside each checkpoint, and copies them into a run that
starts from one, so that it can resume without the other run."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.config import Config, Loaded, config_of_run, flatten
from distflow.config.derived_settings import (
    config_of_policy,
    reads_labels,
    reads_pairs,
    trained_policies,
    trains_scores,
)
from distflow.config.keys.dag import FIRST_POLICY
from distflow.config.keys.schema import with_values
from distflow.errors import UserError
from distflow.launch.configured_models import copy_weights, load_policy, load_policy_tokenizer
from distflow.launch.run_facts import PROMPT_FORMAT
from distflow.launch.user_code import (
    code_of_run,
    is_own_run,
    model_code,
    only_if_trusted,
    without_model_code,
)
from distflow.models.image_inputs import images_of
from distflow.models.loading import quiet_transformers
from distflow.models.lora import has_adapter, named_weights, unwrapped
from distflow.observe.crash_safe_files import empty_folder, read_object
from distflow.runtime.checkpoint.files import MANIFEST, by_age, checkpoints_in
from distflow.runtime.checkpoint.find_checkpoint import (
    CHECKPOINTS,
    is_of_a_run,
    policy_checkpoint,
)
from distflow.training.engine import TrainState

NOTE = "distflow.json"
MODELS = "models"
HUGGINGFACE = "huggingface"
_MODELS = (
    *("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path"),
    *("critic.model.path", "reward_model.model.path", "actor_rollout_ref.ref.path"),
    "distill.teacher.path",
)
_MODELS_BY_NAME = ("reward_model.models", "distill.teachers")

Say = Callable[[str], None]


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    trust_code: bool = False,
    say: Say = lambda line: None,
    adapter: bool = False,
) -> Path:
    """Write the policy of a run's folder (its latest checkpoint) or of one checkpoint; adapters are
    merged, or with `adapter` written alone. If its agents have several policies, each gets a folder
    with its name in the target. If the target already has the same content, nothing is done.

    trust_code: Python code that came with the model may run if the run's config allowed it; `say`
    is called with that code, and with the step. Raises UserError if there is no complete
    checkpoint, the target is not empty, or the code is not trusted.
    """
    checkpoint = policy_checkpoint(source)
    note = {"run": str(source), "step": checkpoint.step, "checkpoint": identity(checkpoint.path)}
    note |= {"adapter": True} if adapter else {}
    say(f"step {checkpoint.step} of {source}")
    if target.is_file():
        raise UserError(f"'{target}' is a file: name a folder to export to")

    exported = read_object(target / NOTE)
    if all(exported.get(key) == note.get(key) for key in ("checkpoint", "adapter")):
        say(f"{target} holds it already")
        return target

    empty_folder(target)
    with checkpoint.reading():
        saved = checkpoint.load("run")
        config = config_of_run(saved["config"])
        trained = TrainState(checkpoint.load("actor")).trained_weights()

    note[PROMPT_FORMAT] = saved["facts"].get(PROMPT_FORMAT, config.data.prompt_format)
    if adapter and not config.actor_rollout_ref.model.lora_rank:
        raise UserError(
            f"{source} has no adapter, because the run trained all weights: remove --adapter"
        )

    code = model_code(config)
    _allow_code(code, saved["config"], trust_code, say)
    if not code:
        config = without_model_code(config)

    policies = trained_policies(config)
    if policies:
        _export_policies(config, trained, source, target)
        (target / NOTE).write_text(json.dumps(note, indent=2) + "\n", "utf-8")
        say(f"exported the policies {', '.join(policies)} to folders in {target}")
        return target

    model = _trained_model(config, trained, source)
    tokenizer = load_policy_tokenizer(config)
    export_model(model, tokenizer, target, note=(NOTE, note), adapter=adapter)
    say(f"exported to {target}")

    return target


def _export_policies(
    config: Config, trained: Mapping[str, Tensor], source: Path, target: Path
) -> None:
    """Each to a folder with its name. The names of its weights begin with it."""
    tokenizer = load_policy_tokenizer(config)
    for name in trained_policies(config):
        own = {}
        for weight, tensor in trained.items():
            if weight.startswith(f"{name}."):
                own[weight.removeprefix(f"{name}.")] = tensor
        model = _trained_model(config_of_policy(config, name), own, source)
        export_model(model, tokenizer, target / name)


def _trained_model(config: Config, trained: Mapping[str, Tensor], source: Path) -> nn.Module:
    # the training machine may have had another device
    model = load_policy(config, torch.device("cpu"))
    if unknown := copy_weights(trained, model):
        raise UserError(
            f"{source} belongs to another model: its '{unknown}' is not a weight of the model, or "
            "has another shape"
        )

    return model


def write_hf_models(run_dir: Path, warn: Say) -> None:
    """Export the policy of each checkpoint to `huggingface/NAME`, and remove those of earlier ones.

    Separate processes export, so that neither memory nor random generators of the run change. warn:
    called with what could not be written; the checkpoint remains complete.
    """
    folder = run_dir / HUGGINGFACE
    checkpoints = by_age(run_dir / CHECKPOINTS)
    folder.mkdir(mode=0o700, exist_ok=True)
    wanted = {path.name: identity(path) for path in checkpoints}

    for left in folder.iterdir():
        is_ours = left.name.startswith(".step-") or "checkpoint" in read_object(left / NOTE)
        if is_ours and read_object(left / NOTE).get("checkpoint") != wanted.get(left.name, ""):
            shutil.rmtree(left, ignore_errors=True)

    for path in checkpoints:
        target = folder / path.name
        if (target / NOTE).exists():  # a folder without it was left empty by a kill
            continue

        done = subprocess.run(
            [sys.executable, "-m", "distflow", "export", path, "--to", target, "--trust-code"],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # which Ctrl-C does not end
        )
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            warn(
                f"{path.name} could not be exported to a Hugging Face folder "
                f"(trainer.save_hf_model): {why[0]}"
            )


def identity(checkpoint: Path) -> str:
    """A checkpoint's identity, from its manifest with the checksums of all parts."""
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def with_models_of_runs(loaded: Loaded, say: Say) -> Loaded:
    """The config, where each run or checkpoint named as a model is replaced by a model folder of
    this run, `models/...`.

    A resumed run uses the copy that it began from. `say` is called with a description. Raises
    UserError as `export_checkpoint` does.
    """
    config = loaded.config
    values: dict[str, Any] = flatten(config)

    changes: dict[str, Any] = {}
    for key in _MODELS:
        folder = _folder(values[key], config, say)
        if folder != values[key]:
            changes[key] = folder

    for key in _MODELS_BY_NAME:
        models = {}
        for name, model in values[key].items():
            models[name] = replace(model, path=_folder(model.path, config, say))
        if models != values[key]:
            changes[key] = models

    policy = changes.get(_MODELS[0], values[_MODELS[0]])
    if policy is not None and (Path(policy) / FIRST_POLICY).is_dir():  # of a run with several
        changes |= _policies_in(Path(policy), config)
    if not changes:
        return loaded

    return replace(loaded, config=with_values(config, changes))


def _policies_in(folder: Path, config: Config) -> dict[str, Any]:
    """The settings by which each policy begins with its own model of an exported run."""
    policies = {}
    for name, given in config.dag.policies.items():
        own = {"model.path": str(folder / name), "model.init": "pretrained"}
        policies[name] = {**given, **own} if (folder / name).is_dir() else given

    return {_MODELS[0]: str(folder / FIRST_POLICY), "dag.policies": policies}


def write_config_of(
    run: Path, file: Path, say: Say, *, trust_code: bool, generates_only: bool = False
) -> Path:
    """Write the config of a run or checkpoint as YAML, with its policy as the model: keys for
    loading the run's initial model are reset. Raises UserError if there is none, or if it names
    code and `trust_code` is off (`code_of_run`)."""
    if (run / "config.json").is_file():
        raise UserError(
            f"{run} is a model: choose a preset: distflow eval PRESET "
            f"actor_rollout_ref.model.path={run}"
        )

    checkpoint = policy_checkpoint(run)
    with checkpoint.reading():
        # `${` of a stored value is text, as it was when the run began: it must not read this user's
        # environment.
        saved = checkpoint.load("run")
        stored = re.sub(r"((?:\\\\)*)\$\{", r"\1\1\\\\${", json.dumps(saved["config"]))
        values = json.loads(stored)
        code = code_of_run(config_of_run(values), generates_only)
        _allow_code(code, saved["config"], trust_code, say)
        begun = {
            "path": str(run),
            "tokenizer_path": None,
            "init": "pretrained",
            "gguf_file": None,
            "revision": None,
        }
        reference = _reference(config_of_run(values), run)
        values["actor_rollout_ref"]["model"] |= begun
        values["actor_rollout_ref"].setdefault("ref", {})["path"] = reference

        if generates_only:  # rows of messages are chats whatever the key says
            values["data"]["prompt_format"] = saved["facts"].get(
                PROMPT_FORMAT, values["data"]["prompt_format"]
            )

    file.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return file


def _reference(config: Config, run: Path) -> str | None:
    """The reference of a run on given preferences, whose loss reads it, although the policy is then
    another one. Raises UserError if it cannot be loaded again."""
    settings = config.actor_rollout_ref
    is_read = reads_labels(config) or (reads_pairs(config) and not trains_scores(config))
    if settings.ref.path is not None or not is_read:
        return settings.ref.path

    model = settings.model
    if model.init == "random" or model.revision or model.gguf_file:
        raise UserError(
            f"{run} is compared with its reference, which is no folder or newest hub model: "
            "name it when the run starts, with actor_rollout_ref.ref.path"
        )
    return model.path


def _allow_code(code: list[str], values: Any, trust_code: bool, say: Say) -> None:
    """Raises UserError for code that is neither trusted nor that of a run which this user started
    here."""
    is_own = bool(code) and not trust_code and is_own_run(values)
    only_if_trusted(code, trust_code or is_own, say)
    if is_own and "" not in sys.path:
        sys.path.insert(0, "")  # where the run's start found modules first


def _folder(path: str | None, config: Config, say: Say) -> str | None:
    if path is None or not is_of_a_run(path):
        return path

    copies = config.trainer.run_dir / MODELS
    run_dir = config.trainer.run_dir
    anew = config.trainer.resume_mode == "never" or not checkpoints_in(run_dir / CHECKPOINTS)

    kept = [
        note.parent for note in copies.glob(f"*/{NOTE}") if read_object(note).get("run") == path
    ]
    if kept and not anew:
        copy = max(kept, key=lambda folder: folder.stat().st_mtime)
        say(f"model: this run's own copy of its initial model {path}, {copy}")
        return str(copy)

    copies.mkdir(mode=0o700, exist_ok=True)
    source = Path(path)
    checkpoint = policy_checkpoint(source)
    say(f"model: step {checkpoint.step} of {source}")
    target = copies / f"{checkpoint.path.name}-{identity(checkpoint.path)[:8]}"
    trusted = config.actor_rollout_ref.model.trust_remote_code

    return str(export_checkpoint(source, target, trust_code=trusted))


def export_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    *,
    note: tuple[str, Mapping[str, object]] | None = None,
    adapter: bool = False,
) -> Path:
    """Write config, safetensors and tokenizer to `folder`, which must not exist or be empty; it
    appears atomically.

    note: a JSON file beside them. adapter: write only the model's adapter, which names the folder
    or hub id of its base model. Returns the folder. Raises UserError if the folder is not empty or
    not writable.
    """
    target = empty_folder(folder).resolve()
    try:
        target.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            if adapter:
                # peft's
                model.save_pretrained(aside, save_embedding_layers=False)  # type: ignore[operator]
            else:
                _save_whole(model, aside)

            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
                if (processor := images_of(tokenizer)) is not None:
                    processor.save(aside)

            if note is not None:
                (aside / note[0]).write_text(json.dumps(note[1], indent=2) + "\n", "utf-8")
            aside.chmod(stat.S_IMODE(target.stat().st_mode))
            aside.rename(target)  # replaces the empty folder; fails if somebody filled it meanwhile
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{target}' cannot be written: {error}") from error

    return Path(folder)


def _save_whole(model: nn.Module, folder: Path) -> None:
    causal = unwrapped(model)
    weights: dict[str, Tensor] = causal.state_dict()
    if has_adapter(model):
        buffers = {name: buffer for name, buffer in causal.named_buffers() if name in weights}
        weights = {**dict(named_weights(model)), **buffers}

    with quiet_transformers():
        causal.save_pretrained(folder, state_dict=weights)
    file = folder / "config.json"  # a reward model's weights are those of either class
    file.write_text(file.read_text().replace("ForTokenClassification", "ForSequenceClassification"))
