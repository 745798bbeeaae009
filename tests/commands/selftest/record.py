"""Makes `reference.json` anew, after a change that is meant to change results, by

    python -m tests.commands.selftest.record

The answers are those of a run of ours; the figures are those of the plain reference loop, trained
on them.
"""

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from distflow.commands.selftest.runs import (
    PRESET_KEYS,
    RECORDED,
    REPLAYED,
    Figures,
    Lab,
    Recorded,
    Step,
    is_update,
    step_of,
)
from distflow.config import load_config
from distflow.data.batch import Batch
from tests.e2e.reference_loop import ReferenceLoop, read_step

NUM_STEPS = 8
BATCH_SIZE = 4


def reference(lab: Lab, run_dir: Path) -> Figures:
    """What the reference loop finds on the groups that a run kept."""
    config = load_config(lab.preset, [*lab.keys("reference"), *REPLAYED]).config
    loop = ReferenceLoop(config, len(lab.prompts))
    steps = list[Step]()
    for number in range(len(lab.prompts)):
        path = run_dir / "tokens" / f"{number + 1:06d}.safetensors"
        samples = read_step(path)
        with torch.no_grad():
            log_probs = torch.cat(
                [loop.log_probs(loop.actor.model, sample)[0] for sample in samples]
            )
        updates = {
            f"{role}/{name}": sum(update[name] for update in found) / len(found)
            for role, found in loop.step(number, samples).items()
            for name in ("loss", "grad_norm")
        }
        assert all(map(is_update, updates))
        steps.append(step_of(Batch.load(path), log_probs, updates))
    trained = {"actor": loop.actor, **({"critic": loop.critic} if loop.critic else {})}
    weights = {
        f"{role}.{name}": weight.detach()
        for role, own in trained.items()
        for name, weight in own.model.named_parameters()
    }
    return Figures(steps, weights)


def record(folder: Path, preset: str) -> Recorded:
    prompts = [
        [f"{17 * step + i}+{7 * i}=" for i in range(BATCH_SIZE)] for step in range(NUM_STEPS)
    ]
    unanswered = [Step([], [], [], [], {}) for _ in prompts]
    lab = Lab.of(folder / preset, preset, Recorded(prompts, Figures(unanswered, {})))
    lab.sync()
    return Recorded(prompts, reference(lab, folder / preset / "sync"))


def write_recorded(path: Path, recorded: Mapping[str, Recorded]) -> None:
    """The inverse of `read_recorded`. Nine digits distinguish any two float32 numbers."""

    def rounded(samples: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[float(f"{value:.9g}") for value in sample] for sample in samples]

    def text(tensor: torch.Tensor) -> str:
        return base64.b64encode(tensor.detach().numpy().astype("<f4").tobytes()).decode()

    found = {
        name: {
            "prompts": one.prompts,
            "steps": [
                {
                    **asdict(step),
                    "sampled": rounded(step.sampled),
                    "log_probs": rounded(step.log_probs),
                }
                for step in one.figures.steps
            ],
            "weights": {
                name: [list(tensor.shape), text(tensor)]
                for name, tensor in one.figures.weights.items()
            },
        }
        for name, one in recorded.items()
    }
    path.write_text(json.dumps(found) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_recorded(RECORDED, {preset: record(Path(folder), preset) for preset in PRESET_KEYS})


if __name__ == "__main__":
    main()
