"""The critic's loss and the loss of a reward model against the references."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algorithms.objectives import PairObjective, compute_value_loss
from distflow.builtin_names import VALUE_LOSSES
from distflow.data.batch import Batch
from tests.algorithms.batches import Drawn, batches
from tests.references.value_loss import pair_loss, value_loss


@pytest.mark.parametrize("kind", VALUE_LOSSES)
@settings(max_examples=40)
@given(
    batch=batches(),
    clip=st.sampled_from((0.5, 0.1, None)),
    delta=st.sampled_from((10.0, 0.3, 1.5)),
)
def test_the_loss_of_the_critic(kind: Any, batch: Drawn, clip: float | None, delta: float) -> None:
    values = batch["log_probs"].clone().requires_grad_()
    options: dict[str, Any] = {"cliprange_value": clip, "huber_delta": delta}
    found, stats = compute_value_loss(
        values, batch["values"], batch["returns"], batch.mask, value_loss=kind, **options
    )
    weights = batch["is_weights"].where(batch.mask > 0, 0.0)
    (found * weights).sum().backward()
    leaf = batch["log_probs"].clone().requires_grad_()

    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        is_token = batch.mask[row] > 0
        old, target = batch.of_tokens(row, "values"), batch.of_tokens(row, "returns")
        wanted, wanted_stats = value_loss(
            leaf[row][is_token], old, target, critic_loss=kind, **options
        )
        torch.testing.assert_close(found[row][is_token], wanted, rtol=1e-12, atol=1e-12)
        assert stats.keys() == wanted_stats.keys()
        for name, value in wanted_stats.items():
            torch.testing.assert_close(stats[name][row][is_token], value.double())
        total = total + (wanted * weights[row][is_token]).sum()

    if not total.requires_grad:
        return

    total.backward()
    assert values.grad is not None and leaf.grad is not None
    torch.testing.assert_close(values.grad, leaf.grad.where(batch.mask > 0, 0.0))


@settings(max_examples=30)
@given(
    pairs=st.lists(
        st.tuples(st.floats(-60.0, 60.0), st.floats(-60.0, 60.0)), min_size=1, max_size=5
    ),
    lengths=st.lists(st.integers(1, 4), min_size=10, max_size=10),
    cut=st.integers(0, 5),
)
def test_pairs_of_a_reward_model(
    pairs: list[tuple[float, float]], lengths: list[int], cut: int
) -> None:
    """In two micro-batches; a text's score is the one at its last token."""
    objective = PairObjective()
    bs = 2 * len(pairs)
    batch = Batch(torch.ones(bs, dtype=torch.int64), torch.tensor(lengths[:bs]))
    batch["loss_mask"] = torch.ones(sum(lengths[:bs]))

    scores = torch.full((bs, max(lengths[:bs])), torch.nan, dtype=torch.float64)
    for row in range(bs):
        scores[row, : lengths[row]] = 99.0
        scores[row, lengths[row] - 1] = pairs[row // 2][row % 2]

    counts = objective.counts(batch)
    sums = dict.fromkeys(("loss", "accuracy", "margin"), 0.0)
    for rows in (range(min(2 * cut, bs)), range(min(2 * cut, bs), bs)):
        micro = batch.select(list(rows))
        width = int(micro.lengths("response").max()) if len(micro) else 0
        _, own = objective({"text_scores": scores[list(rows)][:, :width]}, micro, counts)
        for name, value in own.items():
            sums[name] += float(value)

    number = len(pairs)
    assert sums["loss"] == pytest.approx(sum(pair_loss(*pair) for pair in pairs) / number)
    assert sums["accuracy"] == pytest.approx(sum(a > b for a, b in pairs) / number)
    assert sums["margin"] == pytest.approx(sum(a - b for a, b in pairs) / number, abs=1e-9)
