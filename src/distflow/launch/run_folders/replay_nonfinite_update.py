"""`distflow replay`: reruns a saved non-finite update on the CPU and reports where it went
wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from distflow.algorithms.objectives import PairObjective, SFTObjective
from distflow.checks.nonfinite import BATCH, CONFIG, FACTS, WEIGHTS
from distflow.config import Config, config_from_dict, config_of_run
from distflow.config.derived_settings import (
    is_online,
    reads_labels,
    reads_pairs,
    trains_scores,
)
from distflow.data.batch import Batch
from distflow.errors import UserError, count_of
from distflow.import_target import load_modules
from distflow.launch.configured_models import copy_weights
from distflow.launch.engines import make_factories
from distflow.launch.user_code import (
    algorithm_code,
    model_code,
    only_if_trusted,
    without_model_code,
)
from distflow.observe.crash_safe_files import read_object
from distflow.pipelines.nodes.objectives_from_config import (
    kto_objective,
    policy_objective,
    preference_objective,
    value_objective,
)
from distflow.planning.plan import RankPlan
from distflow.runtime.resources import build_resources
from distflow.training.engine import LossFn, compares_samples
from distflow.training.torch_engine import TorchTrainEngine
from distflow.untrusted_files import MAX_YAML_BYTES, check_tensors, load_yaml, read_file

ROLES = ("actor", "critic")


def replay_bundle(bundle: Path, *, trust_code: bool = False) -> Iterator[str]:
    """Readable lines: non-finite columns and weights, the update's metrics, and each sample that is
    non-finite alone.

    trust_code: modules that the run imported, and code that came with its model, may run here; a
    line lists them. Raises UserError if the folder is not a bundle or is damaged, has weights of a
    model other than the config's, or the code is not trusted.
    """
    if not (bundle / FACTS).is_file():
        raise UserError(
            f"{bundle} is not a bundle: it has no {FACTS}; bundles are in the folder bundles/ of a "
            "run"
        )

    read = _read(bundle)
    config = read.config
    code = [*algorithm_code(config), *model_code(config)]
    notes = list[str]()
    only_if_trusted(code, trust_code, notes.append)
    yield from notes

    if code:
        load_modules(config.trainer.imports)  # they register losses and config groups
        config = config_from_dict(read.keys, judge=False)
    else:
        config = without_model_code(config)

    batch = read.batch
    yield f"update of the {read.role} in step {read.step + 1}: {count_of(len(batch), 'sample')}"
    yield from _non_finite_columns(batch)

    for name, tensor in read.weights.items():
        wrong = int((~tensor.isfinite()).sum())
        if wrong:
            yield f"weight {name}: {wrong} entries are not finite"

    engine = _engine(config, read.role)
    _load_weights(engine.model, read.weights)

    with _blaming(bundle):  # for columns that are missing or not as long as others
        objective = _objective(config, read.role, batch)
        replayed = engine.train_step(batch, objective)

    saved = ", ".join(f"{name} {read.metrics.get(name)}" for name in ("loss", "grad_norm"))
    yield (
        f"loss {replayed['loss']:g}, gradient norm {replayed['grad_norm']:g} (in the run: {saved})"
    )
    yield from _samples_alone(engine, objective, batch, read.weights)


@dataclass(frozen=True)
class _Bundle:
    """What the files of a bundle hold."""

    keys: Any
    """Of the run's config."""
    config: Config
    role: str
    step: int
    """Counted from 0."""
    metrics: dict[str, Any]
    """Of the update in the run."""
    batch: Batch
    weights: dict[str, Tensor]


@contextmanager
def _blaming(bundle: Path) -> Iterator[None]:
    """Turns whatever a damaged or foreign file raises into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{bundle} is damaged, or from another version of distflow: {type(error).__name__}: "
            f"{error}"
        ) from error


def _read(bundle: Path) -> _Bundle:
    with _blaming(bundle):
        keys: Any = load_yaml(read_file(bundle / CONFIG, bundle, MAX_YAML_BYTES))
        facts: Any = read_object(bundle / FACTS, bundle)
        if facts["role"] not in ROLES:
            raise ValueError(f"{FACTS} names the role {facts['role']!r}")

        return _Bundle(
            keys,
            config_of_run(keys),
            facts["role"],
            int(facts["step"]),
            dict(facts["metrics"]),
            Batch.load(bundle / BATCH),
            load_file(check_tensors(bundle / WEIGHTS, bundle)),
        )


def _samples_alone(
    engine: TorchTrainEngine, objective: LossFn, batch: Batch, weights: Mapping[str, Tensor]
) -> Iterator[str]:
    found = 0
    is_pair = compares_samples(objective)
    for row in range(0, len(batch), 1 + is_pair):
        _load_weights(engine.model, weights)
        alone = engine.train_step(batch.select(range(row, row + 1 + is_pair)), objective)
        if alone["skipped"]:
            found += 1
            yield (
                f"sample {batch['uid'][row]} alone: loss {alone['loss']:g}, gradient norm "
                f"{alone['grad_norm']:g}"
            )

    if not found:
        yield (
            "each sample alone is finite: their sum is not, or the run's device computes "
            "differently"
        )


def _non_finite_columns(batch: Batch) -> Iterator[str]:
    for name in batch.names:
        column = batch.flat(name)
        wrong = 0
        if isinstance(column, Tensor):
            wrong = int((~column.isfinite()).sum())

        if wrong:
            yield f"column {name}: {wrong} entries are not finite"


def _engine(config: Config, role: str) -> TorchTrainEngine:
    """The role's engine on the CPU of this process, whatever devices and ranks the run had."""
    settings = config.actor_rollout_ref
    trainer = replace(config.trainer, device="cpu")
    settings = replace(settings, actor=replace(settings.actor, strategy="torch"))
    config = replace(config, trainer=trainer, actor_rollout_ref=settings)
    factories = make_factories(config, {"actor", role}, (), steps=1)
    engine = build_resources(factories, RankPlan(0, "cpu", (), (), (role,), ())).trained()[role]
    assert isinstance(engine, TorchTrainEngine)

    return engine


def _objective(config: Config, role: str, batch: Batch) -> LossFn:
    if role == "critic":
        return value_objective(config)
    if trains_scores(config):
        return PairObjective()
    if reads_labels(config):
        return kto_objective(config)
    if reads_pairs(config) or is_online(config):
        return preference_objective(config)
    if "advantages" in batch:
        return policy_objective(config)
    return SFTObjective()


def _load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError for a weight that the model lacks, since that would be another update."""
    if unknown := copy_weights(weights, model):
        raise UserError(
            f"the bundle's weight {unknown} is not a weight of the model: "
            "actor_rollout_ref.model.path has another model than in the run"
        )
