"""What a checkpoint holds besides weights: a resumed process draws on where the undisturbed one would have."""

import random
from pathlib import Path

import numpy as np
import torch

from distflow.flow.coordinator import Coordinator
from distflow.runtime.checkpoint import CheckpointStore
from distflow.runtime.saved import restore_engines, saved_parts
from tests.e2e.runs import Playground


def draws() -> tuple[list[float], list[float], list[float], list[float]]:
    """From every generator; an odd number of Gaussians, of which Python and numpy keep the second of a pair."""
    python = [random.random(), random.gauss(0, 1)]
    return torch.rand(3).tolist(), torch.randn(3).tolist(), np.random.standard_normal(3).tolist(), python


def test_all_random_draws_continue_as_in_the_undisturbed_process(tmp_path: Path) -> None:
    _, parts = Playground(tmp_path).parts("sft", "data.response_key=answer", "~reward.functions", "~reward.num_workers",
                                          "~custom_reward_function.path", "~actor_rollout_ref.rollout.n")  # fmt: skip
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    draws()
    store = CheckpointStore(tmp_path / "checkpoints")
    writing, saved = store.begin(1), saved_parts(parts, Coordinator(parts.plan), {"node": {"kept": 1}})
    for name, part in saved.items():
        writing.write(name, part)
    writing.commit(saved)
    undisturbed = draws()

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(8)
    assert all(other != first for other, first in zip(draws(), undisturbed, strict=True))
    assert restore_engines(store.load(), parts) == {"node": {"kept": 1}}
    assert draws() == undisturbed
