"""`distflow export`: a checkpoint as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from distflow.config import config_of_run
from distflow.config.errors import UserError
from distflow.models.export import check_target, export_model
from distflow.pipelines.code import model_code, only_if_trusted, without_model_code
from distflow.pipelines.factories import load_policy, load_policy_tokenizer
from distflow.runtime.checkpoint import CheckpointStore
from distflow.runtime.local import CHECKPOINTS
from distflow.training.engine import TrainState


def export_checkpoint(
    source: Path, target: Path, *, trust_code: bool = False, say: Callable[[str], None] = lambda line: None
) -> Path:
    """Write the policy of a run's folder (its latest checkpoint) or of one checkpoint; adapters are merged.

    trust_code: Python code that came with the model may run, where the run's config let it; `say` is told which.
    Raises UserError where there is no whole checkpoint, the target is taken, or such code is not trusted.
    """
    check_target(target)
    store = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    checkpoint = CheckpointStore(store.parent).load(store)
    with checkpoint.reading():
        config = config_of_run(checkpoint.load("run")["config"])
        trained = TrainState(checkpoint.load("actor")).trained_weights()
    code = model_code(config)
    only_if_trusted(code, trust_code, say)
    if not code:
        config = without_model_code(config)
    model = load_policy(config, torch.device("cpu"))  # the machine that trained may have had another
    _fill(model, trained, source)
    return export_model(model, load_policy_tokenizer(config), target)


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
