"""Rules of models: where weights come from, and which of them are trained."""

import os
import re

from distflow.builtin_names import MODELS, ROLLOUT_ENGINES
from distflow.config.derived_settings import trains_scores
from distflow.config.keys.schema import Config
from distflow.config.rules import MODEL, ROLLOUT, Finding, Findings

_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_PATH = f"{MODEL}.path"
_RANK = f"{MODEL}.lora_rank"


def has_model(config: Config) -> Findings:
    """There is a model."""
    if not config.actor_rollout_ref.model.path:
        ours = " or ".join(f"builtin:{name}" for name in MODELS)
        advice = f"set {_PATH} to a folder, a hub id, or {ours} with {MODEL}.init=random"
        yield Finding((_PATH,), "there is no model to train", advice, missing=True)


def gguf_file(config: Config) -> Findings:
    """A GGUF file is one, and its weights are used."""
    model = config.actor_rollout_ref.model
    key = f"{MODEL}.gguf_file"
    if model.gguf_file is None:
        return

    if model.init == "random":
        what = "init=random requests new weights, but gguf_file names trained ones"
        advice = f"set {MODEL}.init=pretrained, or remove the file"
        yield Finding((f"{MODEL}.init", key), what, advice)


def remote_code(config: Config) -> Findings:
    """A model's code runs only if it is pinned."""
    model = config.actor_rollout_ref.model

    # an absolute one is a folder, of this machine or of another
    path = os.path.expanduser(model.path or "")
    if not model.trust_remote_code or not model.path or os.path.isdir(path) or os.path.isabs(path):
        return

    is_pinned = model.revision is not None and _COMMIT.fullmatch(model.revision)
    if not is_pinned and not model.path.startswith("builtin:"):
        yield Finding(
            (f"{MODEL}.trust_remote_code", _PATH, f"{MODEL}.revision"),
            f"code of '{model.path}' would run, but its revision is not pinned, so it could change "
            "later",
            f"set {MODEL}.revision to a commit hash, or {_PATH} to a local folder",
        )


def unmerged_adapters(config: Config) -> Findings:
    """An engine that takes unmerged adapters serves them."""
    rollout = config.actor_rollout_ref.rollout
    able = [name for name, entry in ROLLOUT_ENGINES.items() if entry.serves_adapters]

    is_able = rollout.name in able
    if not config.actor_rollout_ref.model.lora_merge and (rollout.url or not is_able):
        what = (
            f"only a server of {' or '.join(able)} that the run starts serves an adapter beside "
            "its weights"
        )
        keys = (f"{MODEL}.lora_merge", f"{ROLLOUT}.{'url' if is_able else 'name'}")
        yield Finding(keys, what, f"set {MODEL}.lora_merge=true")


def adapters(config: Config) -> Findings:
    """Adapters have modules, and trained weights below them."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return

    if model.init == "random":
        what = "the base weights below the adapters would stay random"
        advice = f"set {_RANK}=0, or {MODEL}.init=pretrained"
        yield Finding((_RANK, f"{MODEL}.init"), what, advice)

    if trains_scores(config):
        what = "an adapter does not train the reward model's new head"
        yield Finding((_RANK, "dag.pipeline"), what, f"set {_RANK}=0")


RULES = (has_model, gguf_file, remote_code, unmerged_adapters, adapters)
