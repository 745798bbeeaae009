"""`distflow replay`: runs a saved non-finite update again on the CPU and says where it went wrong."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn

from distflow.config import Config, config_from_dict
from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.pipelines.engines import build_engines, load_policy
from distflow.pipelines.objectives import policy_objective, sft_objective, value_objective
from distflow.training.engine import LossFn
from distflow.training.torch_engine import TorchTrainEngine


def replay_bundle(bundle: Path) -> Iterator[str]:
    """Lines for people: non-finite columns, the update's metrics, and each sample that is non-finite by itself.

    Raises UserError where the folder is no bundle.
    """
    if not (bundle / "bundle.json").is_file():
        raise UserError(f"{bundle} is no bundle: it has no bundle.json; bundles lie below a run's folder, in bundles/")
    facts = json.loads((bundle / "bundle.json").read_text())
    config = _on_cpu(config_from_dict(OmegaConf.to_container(OmegaConf.load(bundle / "config.yaml")), judge=False))  # type: ignore[arg-type]
    batch = Batch.load(bundle / "batch.safetensors")
    yield f"update of the {facts['role']} in step {facts['step'] + 1}: {len(batch)} samples"
    yield from _non_finite_columns(batch)
    engine = _engine(config, facts["role"])
    _load_weights(engine.model, load_file(bundle / "weights.safetensors"))
    objective = _objective(config, facts["role"], batch)
    snapshot = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    metrics = engine.train_step(batch, objective)
    yield f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g} (saved: {facts['metrics']})"
    for row in range(len(batch)):
        _restore(engine.model, snapshot)
        alone = engine.train_step(batch.select([row]), objective)
        if alone["skipped"]:
            yield f"sample {batch['uid'][row]} alone: loss {alone['loss']:g}, gradient norm {alone['grad_norm']:g}"


def _on_cpu(config: Config) -> Config:
    return replace(config, trainer=replace(config.trainer, device="cpu"))


def _non_finite_columns(batch: Batch) -> Iterator[str]:
    for name in batch.names:
        column = batch.flat(name)
        if isinstance(column, Tensor) and column.is_floating_point() and not bool(column.isfinite().all()):
            yield f"column {name}: {int((~column.isfinite()).sum())} entries are not finite"


def _engine(config: Config, role: str) -> TorchTrainEngine:
    engines = build_engines(config, load_policy(config), {"critic"} if role == "critic" else (), None, steps=1)
    engine = engines.critic if role == "critic" else engines.actor
    assert isinstance(engine, TorchTrainEngine)
    return engine


def _objective(config: Config, role: str, batch: Batch) -> LossFn:
    if role == "critic":
        return value_objective(config)
    return policy_objective(config) if "advantages" in batch else sft_objective(config)


def _load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in weights.items():
            if name in own:
                own[name].copy_(tensor)


def _restore(model: nn.Module, snapshot: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(snapshot[name])
