"""One of two gloo ranks that share a judge's weights: what it says of its own responses."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distflow.cluster.process_groups import TorchCollective
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.models.loading import load_model, load_tokenizer
from distflow.models.sharding import Sharding
from distflow.rollout.engine import SamplingParams
from distflow.runtime.judge_engine import Judge
from distflow.training.engine import Collective, OneRank

QUESTIONS = [[5, 6, 7], [9] * 30, [11], list(range(4, 24)), [8, 3]]
RESPONSES = ["so a", "so b", "a longer one that ends in 3", "x"]
SHARES = {
    "weights": [(QUESTIONS[:4], RESPONSES), (QUESTIONS[4:], [])],
    "layers": [(QUESTIONS, RESPONSES)] * 2,
}
"""Of each rank, by what is divided over the two."""
JUDGES = ("random", "judge")


def judge_of(model: nn.Module, folder: Path, group: Collective) -> Judge:
    params = SamplingParams(12, greedy=True, stop_token_ids=(2,))
    return Judge(model, load_tokenizer(folder), None, "{response}", params, 128, group)


def said_by(
    model: nn.Module, folder: Path, group: Collective, questions: list[list[int]], texts: list[str]
) -> list:
    """Tokens written after the questions, and scores of the texts."""
    prompt = [Segment("prompt", (7,))]
    batch = Batch.from_samples(
        [Sample(f"0-{i}", 0, prompt, prompt="Q", response=t) for i, t in enumerate(texts)]
    )
    judge = judge_of(model, folder, group)
    return [judge._write_together(questions), judge.score(batch)]


def main(rank: int, folder: Path) -> None:
    meshes = {
        "weights": (init_device_mesh("cpu", (2,)), TorchCollective()),
        "layers": (init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), OneRank()),
    }
    for name, (mesh, group) in meshes.items():
        for kind in JUDGES:
            model = load_model(folder / kind, sharding=Sharding(mesh))
            found = said_by(model, folder / kind, group, *SHARES[name][rank])
            torch.save(found, folder / f"{name}-{kind}-{rank}.pt")
