"""`distflow export`: a checkpoint as a Hugging Face folder."""

from pathlib import Path

import torch
from torch import Tensor, nn

from distflow.config import config_from_dict
from distflow.config.errors import UserError
from distflow.models.export import export_model
from distflow.pipelines.factories import choose_device, load_policy, load_policy_tokenizer
from distflow.runtime.checkpoint import CheckpointStore
from distflow.runtime.local import CHECKPOINTS
from distflow.training.engine import TrainState


def export_checkpoint(source: Path, target: Path) -> Path:
    """Write the policy of a run's folder (its latest checkpoint) or of one checkpoint; adapters are merged.

    Raises UserError where there is no whole checkpoint, or the target is taken.
    """
    store = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    checkpoint = CheckpointStore(store.parent).load(store)
    config = config_from_dict(checkpoint.load("run")["config"], judge=False)
    model = load_policy(config, choose_device(config))
    _fill(model, TrainState(checkpoint.load("actor")).trained_weights(), source)
    return export_model(model, load_policy_tokenizer(config), target)


def _fill(model: nn.Module, trained: dict[str, Tensor], source: Path) -> None:
    parameters = dict(model.named_parameters())
    unknown = [name for name in trained if name not in parameters]
    if unknown:
        raise UserError(f"{source} was made from another model: it has '{unknown[0]}', the model has no such weight")
    with torch.no_grad():
        for name, tensor in trained.items():
            parameters[name].copy_(tensor)
