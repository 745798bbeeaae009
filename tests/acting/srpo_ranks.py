"""SRPO's rewards of the episodes that each rank of a group has."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from distflow.acting.srpo import SrpoSettings
from distflow.acting.srpo_nodes import shape_rewards
from distflow.cluster.process_groups import TorchCollective
from distflow.training.engine import Collective, OneRank

NUMBER = 24


def episodes(rows: list[int]) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(0)
    vectors = torch.randn(NUMBER, 3, generator=draws, dtype=torch.float64)
    success = torch.arange(NUMBER) % 3 == 0
    valid = torch.arange(NUMBER) % 7 != 5
    vectors[success] = vectors[success].round()

    return {
        "uid": [f"{row // 4}-{row % 4}" for row in rows],
        "embeddings": [vectors[row].tolist() for row in rows],
        "success": success[rows],
        "valid": valid[rows],
        "domain": ["default"] * len(rows),
        "reward_extra": [{"instruction": "red" if row % 2 else "blue"} for row in rows],
        "reward_parts": [{"success": float(success[row])} for row in rows],
        "response_mask": torch.tensor([[1.0, 1.0, 0.0]] * len(rows)),
    }


def shaped(rows: list[int], reduce: Collective) -> dict[str, Any]:
    """By the id of each episode: its tokens' rewards and its parts."""
    given = episodes(rows)
    output: Any = shape_rewards(**given, reduce=reduce, settings=SrpoSettings())
    rewards = output.batch["token_level_rewards"].tolist()
    parts = output.batch["reward_parts"]
    return dict(zip(given["uid"], zip(rewards, parts, strict=True), strict=True)) | {
        "metrics": output.metrics
    }


def main(rank: int, folder: Path) -> None:
    reduce = (
        TorchCollective(torch.distributed.group.WORLD)
        if torch.distributed.get_world_size() > 1
        else OneRank()
    )
    rows = list(range(NUMBER))[rank :: reduce.size]
    aside = folder / f".{rank}.json"
    aside.write_text(json.dumps(shaped(rows[::-1], reduce)))
    os.replace(aside, folder / f"{rank}.json")
