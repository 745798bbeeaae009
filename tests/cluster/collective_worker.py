"""One of three gloo ranks that reduces tensors, numbers and named numbers, and one set of names
that differs."""

import json
from pathlib import Path

import torch

from distflow.cluster.process_groups import TorchCollective


def main(rank: int, folder: Path) -> None:
    ranks = TorchCollective()
    tensor = torch.tensor([[1.0, -2.0], [float(rank), 0.5]])

    found: dict[str, object] = {
        "place": [ranks.rank, ranks.size],
        "tensor": [ranks.sum(tensor).tolist(), ranks.max(tensor).tolist()],
        "unchanged": bool(tensor[1, 0] == rank),
        "number": [ranks.sum(2**40 + 0.25 * rank), ranks.max(-1.0 - rank)],
        "whole": ranks.max(rank + 1),
        "named": [
            ranks.sum({"b": float(rank), "a": 1.0} if rank else {"a": 1.0, "b": 0.0}),
            ranks.max({"a": -float(rank)}),
            ranks.sum({}),
        ],
        "integers": ranks.sum(torch.tensor([2**60])).tolist(),
    }
    try:
        ranks.sum({"loss": 1.0} if rank == 1 else {"loss": 1.0, "kl": 0.0})
    except ValueError as error:
        found["refused"] = str(error)

    found["afterwards"] = ranks.sum(1.0)
    (folder / f"{rank}.json").write_text(json.dumps(found))
