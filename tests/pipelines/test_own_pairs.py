"""Pairs of a group's own responses: the best and the worst, without ties and reward errors."""

import torch

from distflow.data.batch import Batch
from distflow.pipelines.nodes.own_pairs import choose_pairs, pairs_of


def scored(scores: list[float], groups: list[int], valid: list[bool]) -> Batch:
    number = len(scores)
    batch = Batch(torch.ones(number, dtype=torch.int64), torch.full((number,), 2))
    batch["response_mask"] = torch.ones(2 * number)
    batch["group_index"] = torch.tensor(groups)
    batch["valid"] = torch.tensor(valid)
    batch["scores"] = torch.tensor(scores, dtype=torch.float64)
    batch["uid"] = [f"{group}-{row}" for row, group in enumerate(groups)]
    return batch


def test_best_against_worst_of_each_group() -> None:
    """Ties, and groups with one valid response, have no pair; of equal ones the first counts."""
    batch = scored(
        [0.5, 0.0, 1.0, 1.0, 0.2, 0.2, 9.0, 0.1, 0.4, 0.3],
        [3, 3, 3, 3, 1, 1, 1, 2, 2, 2],
        [True, True, True, True, True, True, False, False, True, False],
    )
    chosen = choose_pairs(batch)
    batch = batch.merge(_with(batch, chosen.batch["preferred"]))
    assert batch["preferred"].tolist() == [0, -1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert chosen.metrics == {"pairs/ties_frac": 2 / 3}
    assert pairs_of(batch)["uid"] == ["3-2", "3-1"], "the chosen one is first"


def _with(batch: Batch, preferred: torch.Tensor) -> Batch:
    found = batch.only(())
    found["preferred"] = preferred
    return found


def test_a_step_without_pairs_is_empty() -> None:
    batch = scored([1.0, 1.0], [0, 0], [True, True])
    chosen = choose_pairs(batch)
    assert chosen.metrics == {"pairs/ties_frac": 1.0}
    assert len(pairs_of(_with(batch, chosen.batch["preferred"]).merge(batch))) == 0
