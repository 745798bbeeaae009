"""`reference.json`: the figures of the plain reference loop, and the groups that it trained on.

Sampled responses may differ from processor to processor, so the groups are part of the record; weights are float32,
their bytes in base64.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distflow.selftest.figures import Figures, Step

RECORDED = Path(__file__).with_name("reference.json")


@dataclass(frozen=True)
class Recorded:
    """Of one pipeline. prompts: of each step, in order; a step's responses follow the order of its prompts."""

    prompts: list[list[str]]
    figures: Figures


def read_recorded(path: Path) -> dict[str, Recorded]:
    """By pipeline."""
    return {name: _decoded(found) for name, found in json.loads(path.read_text()).items()}


def write_recorded(path: Path, recorded: Mapping[str, Recorded]) -> None:
    path.write_text(json.dumps({name: _encoded(found) for name, found in recorded.items()}) + "\n")


def _encoded(recorded: Recorded) -> dict[str, object]:
    figures = recorded.figures
    return {
        "prompts": recorded.prompts,
        "steps": [
            {**asdict(step), "sampled": _digits(step.sampled), "log_probs": _digits(step.log_probs)}
            for step in figures.steps
        ],
        "weights": {name: [list(tensor.shape), _text(tensor)] for name, tensor in figures.weights.items()},
    }


def _digits(samples: Sequence[Sequence[float]]) -> list[list[float]]:
    """Nine digits, which distinguish any two float32 numbers."""
    return [[float(f"{value:.9g}") for value in sample] for sample in samples]


def _decoded(found: Mapping[str, object]) -> Recorded:
    steps, weights, prompts = found["steps"], found["weights"], found["prompts"]
    assert isinstance(steps, list) and isinstance(weights, dict) and isinstance(prompts, list)
    tensors = {name: _tensor(text, shape) for name, (shape, text) in weights.items()}
    return Recorded(prompts, Figures([Step(**step) for step in steps], tensors))


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.detach().numpy().astype("<f4").tobytes()).decode()


def _tensor(text: str, shape: list[int]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)).view(shape)
