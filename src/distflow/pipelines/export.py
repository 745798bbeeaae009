"""`distflow export`: a checkpoint as a Hugging Face folder, which says in `distflow.json` what it was made from."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from distflow.config import config_of_run
from distflow.config.errors import UserError
from distflow.models.export import check_target, export_model
from distflow.observe.jsonlines import read_object
from distflow.pipelines.code import model_code, only_if_trusted, without_model_code
from distflow.pipelines.models import load_policy, load_policy_tokenizer
from distflow.runtime.checkpoint import Checkpoint
from distflow.runtime.checkpoint_files import MANIFEST
from distflow.runtime.policy import described, policy_checkpoint
from distflow.training.engine import TrainState

NOTE = "distflow.json"

Say = Callable[[str], None]


def export_checkpoint(source: Path, target: Path, *, trust_code: bool = False, say: Say = lambda line: None) -> Path:
    """Write the policy of a run's folder (its latest checkpoint) or of one checkpoint; adapters are merged. Where the
    target holds just that already, nothing is done.

    trust_code: Python code that came with the model may run, where the run's config let it; `say` is told which, and
    which step it is.
    Raises UserError where there is no whole checkpoint, the target is taken, or such code is not trusted.
    """
    checkpoint = policy_checkpoint(source)
    note = {"run": str(source), "step": checkpoint.step, "checkpoint": identity(checkpoint)}
    say(described(checkpoint, source))
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
    _fill(model, trained, source)
    export_model(model, load_policy_tokenizer(config), target, note=(NOTE, note))
    say(f"exported to {target}")
    return target


def identity(checkpoint: Checkpoint) -> str:
    """Tells a checkpoint from any other: its manifest has the checksums of all that it holds."""
    return hashlib.sha256((checkpoint.path / MANIFEST).read_bytes()).hexdigest()


def _fill(model: nn.Module, trained: dict[str, Tensor], source: Path) -> None:
    parameters = dict(model.named_parameters())
    unknown = [name for name, tensor in trained.items() if not _fits(parameters.get(name), tensor)]
    if unknown:
        raise UserError(
            f"{source} was made from another model: its '{unknown[0]}' is no weight of the model, or of another shape"
        )
    with torch.no_grad():
        for name, tensor in trained.items():
            parameters[name].copy_(tensor)


def _fits(own: Tensor | None, stored: Tensor) -> bool:
    return own is not None and own.shape == stored.shape
