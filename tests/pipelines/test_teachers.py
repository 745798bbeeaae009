"""What a teacher answers is a distribution, or the run ends with the sample and the token."""

import pytest
import torch

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.pipelines.nodes.teachers import check_scores


def scored(log_probs: list[float], top: list[list[float]] | None = None) -> Batch:
    batch = Batch(torch.tensor([1, 1]), torch.tensor([1, 2]))
    batch["teacher_log_probs"] = torch.tensor(log_probs)
    if top is not None:
        batch["teacher_top_ids"] = torch.zeros(3, len(top[0]), dtype=torch.int64)
        batch["teacher_top_log_probs"] = torch.tensor(top)
    return batch


def test_distributions_are_accepted() -> None:
    check_scores(scored([-1.0, 0.0, -900.0]), ["0-0", "0-1"])
    half = [-0.6932, -0.6932]
    check_scores(scored([-1.0, 0.0, -2.0], [half, [-1e-7, -20.0], half]), ["0-0", "0-1"])


@pytest.mark.parametrize("wrong", [float("nan"), 0.5, float("inf")])
def test_a_number_that_is_no_log_prob_is_told_with_its_place(wrong: float) -> None:
    with pytest.raises(UserError, match=r"token 1 of sample 0-1"):
        check_scores(scored([-1.0, -1.0, wrong]), ["0-0", "0-1"])


@pytest.mark.parametrize("wrong", [[-0.1, -0.5], [float("nan"), -1.0], [0.5, -3.0]])
def test_likeliest_tokens_of_more_than_all_mass_are_told(wrong: list[float]) -> None:
    half = [-0.7, -0.7]
    with pytest.raises(UserError, match=r"token 0 of sample 0-1"):
        check_scores(scored([-1.0, -1.0, -1.0], [half, wrong, half]), ["0-0", "0-1"])
