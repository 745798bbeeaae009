"""Tensors and loss terms that do nothing are found, once, and no others."""

import pytest
import torch

from distflow.checks.movement import LossTerms, Movement, fingerprints
from distflow.training.engine import TrainState
from tests.checks.batches import WeightsOnly

MOVES = {"lr": 1e-3, "grad_norm": 1.0, "skipped": 0.0}


def updates(
    movement: Movement, engine: WeightsOnly, metrics: list[dict[str, float]]
) -> list[list[str]]:
    """What each update found; every update moves the tensor `live` by one bit."""
    found = []
    for update in metrics:
        engine.tensors["live"] = torch.nextafter(engine.tensors["live"], torch.tensor(9.0))
        found.append(movement.updated(engine, update))
    return found


def test_a_tensor_that_stays_is_named_once_after_so_many_updates():
    engine = WeightsOnly(live=torch.ones(4), dead=torch.ones(4))
    found = updates(Movement(after=3), engine, [MOVES] * 8)
    assert found == [[], [], [], ["dead"], [], [], [], []]


def test_updates_that_move_nothing_by_design_do_not_count():
    still = [
        MOVES | change
        for change in (
            {"lr": 0.0},
            {"grad_norm": 0.0},
            {"skipped": 1.0},
            {"grad_norm": float("nan")},
        )
    ]
    engine = WeightsOnly(live=torch.ones(4), dead=torch.ones(4))
    assert updates(Movement(after=2), engine, [MOVES, *still * 5, MOVES]) == [[]] * 22


def test_while_the_learning_rate_rises_nothing_is_judged():
    warm_up = [MOVES | {"lr": 1e-9 * (i + 1)} for i in range(30)]
    engine = WeightsOnly(live=torch.ones(4), norm=torch.ones(4))
    movement = Movement(after=3)
    assert updates(movement, engine, warm_up) == [[]] * 30
    engine.tensors["norm"] = engine.tensors["norm"] - 1e-6
    assert updates(movement, engine, [MOVES | {"lr": 3e-8}] * 4) == [[]] * 4


def test_weight_decay_alone_is_no_training():
    engine = WeightsOnly(live=torch.ones(4), decayed=torch.ones(4))
    engine.moments["decayed"] = torch.zeros(4)
    movement = Movement(after=2)
    updates(movement, engine, [MOVES] * 2)
    engine.tensors["decayed"] = engine.tensors["decayed"] * 0.9
    assert updates(movement, engine, [MOVES]) == [["decayed"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_anywhere_and_opposite_changes_are_seen(dtype):
    weight = torch.ones(64, 33, dtype=dtype)

    def fingerprint(tensor: torch.Tensor) -> str:
        return fingerprints(TrainState({"model.w": tensor}))["w"]

    changed = weight.clone()
    changed[63, 32] = 1 + torch.finfo(dtype).eps
    opposite = weight.clone()
    opposite[0, 0] = 1 + 2 * torch.finfo(dtype).eps
    opposite[0, 1] = 1 - torch.finfo(dtype).eps
    assert len({fingerprint(w) for w in (weight, changed, opposite, weight.T)}) == 4
    assert fingerprint(weight.T) == fingerprint(weight.T.contiguous())


def test_a_term_that_was_alive_once_is_alive():
    terms = LossTerms(("pg", "kl", "entropy"), after=3)
    steps = [{"pg": 0.0, "kl": 0.0}, {"pg": 0.0, "kl": 1e-12}, {"pg": 0.0, "kl": 0.0}, {"pg": 0.0}]
    assert [terms.updated(step) for step in steps] == [[], [], ["pg", "entropy"], []]
