"""The numbers of a run that another run must reproduce, the differences between two runs, and `reference.json`: the
figures of the plain reference loop, and the groups that it trained on.

Sampled responses may differ between processors, so the groups are part of the record; weights are float32, their bytes
in base64.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.observe.run_reader import read_metrics
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS
from distflow.runtime.run_reporter import load_groups

RECORDED = Path(__file__).with_name("reference.json")
_LOSS, _NORM = "/loss", "/grad_norm"


class Unlike(Exception):
    """Two runs differ in more than numbers: in tokens or in steps."""


@dataclass(frozen=True)
class Step:
    """One training step. answers: token ids of each response. sampled, log_probs: log-probs of these tokens, from the
    engine that sampled them and from the trainer before the step. scores: of each sample. updates: loss and gradient
    norm by the run's names, means over the step's updates."""

    answers: Sequence[Sequence[int]]
    sampled: Sequence[Sequence[float]]
    log_probs: Sequence[Sequence[float]]
    scores: Sequence[float]
    updates: Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """The figures of a whole run. weights: at its end, by "role.name"."""

    steps: Sequence[Step]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Differences:
    """The largest difference of each kind: |a - b|, relative for numbers beyond 1."""

    loss: float
    grad_norm: float
    log_prob: float
    weight: float

    def within(self, limit: float) -> bool:
        """Whether all differences are within the limit; False if one is NaN."""
        return all(found <= limit for found in (self.loss, self.grad_norm, self.log_prob, self.weight))


def figures_of(run_dir: Path) -> Figures:
    """The figures of a finished run, whose folder has all groups and the last checkpoint."""
    steps = []
    for record in read_metrics(run_dir):
        if record.kind == "train":
            batch = load_groups(run_dir, record.step)
            updates = {name: value for name, value in record.values.items() if is_update(name)}
            steps.append(step_of(batch, batch.flat("old_log_probs"), updates))
    checkpoint = CheckpointStore(run_dir / CHECKPOINTS).load()
    if checkpoint.step != len(steps):
        raise Unlike(f"{run_dir} has {len(steps)} steps, and its last checkpoint is of step {checkpoint.step}")
    weights = {
        f"{role}.{name.removeprefix('model.')}": tensor
        for role in ("actor", "critic")
        if role in checkpoint.files
        for name, tensor in checkpoint.load(role).items()
        if name.startswith("model.")
    }
    return Figures(steps, weights)


def is_update(metric: str) -> bool:
    """Whether a step's metric is a loss or a gradient norm of one of its engines."""
    return metric in (f"{role}{kind}" for role in ("actor", "critic") for kind in (_LOSS, _NORM))


def step_of(batch: Batch, log_probs: Tensor, updates: Mapping[str, float]) -> Step:
    """The figures of a step's batch. log_probs: flat, the trainer's."""
    lengths = batch.lengths("response").tolist()
    answers, sampled, scored = (
        [part.tolist() for part in column.split(lengths)]
        for column in (batch.flat("response_ids"), batch.flat("rollout_log_probs"), log_probs)
    )
    return Step(answers, sampled, scored, batch["scores"].tolist(), updates)


def differences(one: Figures, other: Figures) -> Differences:
    """Raises Unlike if the runs differ in steps, responses, scores or the names of weights."""
    if len(one.steps) != len(other.steps):
        raise Unlike(f"{len(one.steps)} steps and {len(other.steps)}")
    _same("weights", one.weights.keys(), other.weights.keys())
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        _same(f"responses in step {number}", a.answers, b.answers)
        _same(f"scores in step {number}", a.scores, b.scores)
        _same(f"losses in step {number}", a.updates.keys(), b.updates.keys())
    return Differences(*(_largest(a, b) for a, b in zip(_numbers(one), _numbers(other), strict=True)))


def _same(what: str, one: object, other: object) -> None:
    if one != other:
        raise Unlike(f"other {what}")


def _numbers(figures: Figures) -> Iterator[Tensor]:
    """Losses, gradient norms, log-probs and weights of the whole run."""
    for kind in (_LOSS, _NORM):
        names = ((step, name) for step in figures.steps for name in sorted(step.updates) if name.endswith(kind))
        yield torch.tensor([step.updates[name] for step, name in names], dtype=torch.float64)
    samples = (sample for step in figures.steps for sample in (*step.sampled, *step.log_probs))
    yield torch.tensor([value for sample in samples for value in sample])
    yield torch.cat([figures.weights[name].flatten() for name in sorted(figures.weights)])


def _largest(one: Tensor, other: Tensor) -> float:
    a, b = one.double(), other.double()
    return float(((a - b).abs() / a.abs().clamp(min=1)).max())


@dataclass(frozen=True)
class Recorded:
    """The record of a pipeline. prompts: of each step, in order; a step's responses follow the order of its prompts."""

    prompts: list[list[str]]
    figures: Figures


def read_recorded(path: Path) -> dict[str, Recorded]:
    """The records, by pipeline."""
    return {
        name: Recorded(
            found["prompts"],
            Figures(
                [Step(**step) for step in found["steps"]],
                {name: _tensor(text, shape) for name, (shape, text) in found["weights"].items()},
            ),
        )
        for name, found in json.loads(path.read_text()).items()
    }


def _tensor(text: str, shape: list[int]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)).view(shape)
