"""The whole objective of the policy in any micro-batches: its gradient and its metrics are the
reference's."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algorithms.objectives import PolicyObjective, SFTObjective, ValueObjective
from distflow.algorithms.rollout_correction import Correction
from distflow.builtin_names import KL_TYPES, LOSS_AGG_MODES, POLICY_LOSSES
from distflow.data.batch import Batch
from tests.algorithms.batches import Drawn, batches, choose, find_reference
from tests.algorithms.test_losses import OPTIONS
from tests.references import rollout_correction
from tests.references.aggregation import aggregate
from tests.references.objective import Response, Settings, objective
from tests.references.policy_losses import REFERENCES
from tests.references.tokens import Tokens
from tests.references.value_loss import value_loss

STEP = 5
COLUMNS = {
    "old_log_probs": "old_log_probs",
    "prox_log_probs": "prox_log_probs",
    "ref_log_prob": "ref_log_prob",
    "rollout_log_probs": "rollout_log_probs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "token_level_scores": "scores",
    "selected_tokens": "selected",
    "rollout_is_weights": "is_weights",
}
SPLITS = st.lists(st.integers(0, 2), min_size=16, max_size=16)
MODES = st.sampled_from(LOSS_AGG_MODES)


def lengths_of(drawn: Drawn) -> list[int]:
    """Responses end at their last token that counts."""
    lengths = []
    for own in drawn.mask.tolist():
        lengths.append(max((token + 1 for token, counts in enumerate(own) if counts), default=0))
    return lengths


def batch_of(drawn: Drawn, versions: list[int]) -> Batch:
    """versions: of the tokens by their place in a response."""
    lengths = lengths_of(drawn)
    batch = Batch(torch.ones(len(drawn), dtype=torch.int64), torch.tensor(lengths).long())
    is_there = torch.arange(drawn.mask.shape[1]) < torch.tensor(lengths).view(-1, 1)
    batch["loss_mask"] = drawn.mask[is_there]
    for name, column in COLUMNS.items():
        batch[name] = drawn[column][is_there]
    places = torch.arange(drawn.mask.shape[1]).expand_as(drawn.mask)[is_there]
    batch["turn_index"] = places // 3
    of_tokens = torch.tensor(versions)[places] if len(places) else places
    behind = (STEP - of_tokens).double()
    batch["prox_alpha"] = behind / (behind + 1.0)
    batch["domain"] = drawn.domains

    return batch


def responses_of(
    drawn: Drawn,
    log_probs: Tensor,
    entropy: Tensor,
    unit: int,
    versions: list[int] | None = None,
    derives_old: bool = False,
) -> list[Response]:
    """unit: tokens of an action within a turn of 3. versions: interpolate the proximal policy."""
    found = []
    for row in range(len(drawn)):
        is_token = drawn.mask[row] > 0
        places = is_token.nonzero()[:, 0].tolist()
        now = log_probs[row][is_token]
        old = drawn.of_tokens(row, "old_log_probs")
        if derives_old:
            old = now.detach()

        prox = drawn.of_tokens(row, "prox_log_probs")
        if versions is not None:
            between = []
            for place, one, other in zip(places, now.tolist(), old.tolist(), strict=True):
                between.append(rollout_correction.proximal(one, other, versions[place], STEP))
            prox = torch.tensor(between, dtype=torch.float64)

        tokens = Tokens(
            now=now,
            old=old,
            prox=prox,
            advantages=drawn.of_tokens(row, "advantages"),
            selected=drawn.of_tokens(row, "selected") > 0,
            score=math.fsum(drawn.of_tokens(row, "scores").tolist()),
        )
        response = Response(
            tokens=tokens,
            entropy=entropy[row][is_token],
            ref=drawn.of_tokens(row, "ref_log_prob"),
            rollout=drawn.of_tokens(row, "rollout_log_probs"),
            weights=drawn.of_tokens(row, "is_weights"),
            units=[(place // 3, place % 3 // unit) for place in places],
            domain=drawn.domains[row],
        )
        found.append(response)

    return found


def run(
    found: Any, drawn: Drawn, batch: Batch, split: list[int], names: tuple[str, ...]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, gradient by each output) over three micro-batches, which may be empty. They have
    the columns that the objective names, and those of the policies that a ratio may be to."""
    known = (*found.reads, *getattr(found, "optional", ()), "old_log_probs", "prox_log_probs")
    batch = batch.only({name for name in known if name in batch})
    leaves = {name: drawn[name].clone().requires_grad_() for name in names}
    outputs = {"entropy": "entropy", "log_probs": "log_probs", "values": "values"}
    counts = found.counts(batch)

    sums = dict[str, float]()
    for part in range(3):
        rows = [row for row in range(len(drawn)) if split[row % len(split)] == part]
        micro = batch.select(rows)
        width = int(micro.lengths("response").max()) if rows else 0
        given_outputs = {outputs[name]: leaf[rows][:, :width] for name, leaf in leaves.items()}
        loss, own = found(given_outputs, micro, counts)
        if loss.requires_grad:
            loss.backward()
        for name, value in own.items():
            sums[name] = sums.get(name, 0.0) + float(value)

    gradients = {}
    for name, leaf in leaves.items():
        gradients[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found.finish(sums, counts), gradients


def check(
    drawn: Drawn,
    metrics: dict[str, float],
    gradients: dict[str, Tensor],
    loss: Tensor,
    wanted: dict[str, float],
    leaves: dict[str, Tensor],
) -> None:
    # a statistic of a domain without rows is 0, where a reference has none
    missing = metrics.keys() - wanted.keys()
    assert not any(metrics[name] for name in missing)
    present = {name: metrics[name] for name in wanted}
    assert present == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    if loss.requires_grad:
        loss.backward()

    for name, leaf in leaves.items():
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        inside = grad.where(drawn.mask > 0, 0.0)
        torch.testing.assert_close(gradients[name], inside, rtol=1e-9, atol=1e-12)


def fresh(drawn: Drawn) -> dict[str, Tensor]:
    return {name: drawn[name].clone().requires_grad_() for name in ("log_probs", "entropy")}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=25)
@given(drawn=batches(), mode=MODES, split=SPLITS, data=st.data())
def test_all_terms_of_a_loss(
    name: str, drawn: Drawn, mode: str, split: list[int], data: Any
) -> None:
    find_reference(REFERENCES, name, "policy loss", "tests/references/policy_losses.py")
    options = data.draw(choose(OPTIONS.get(name, {})))
    if options.get("behav_imp_weight_mode") == "disabled":
        options.pop("rejection_sampling", None)
    chosen = Settings(
        loss=name,
        options=options,
        mode=mode,
        scale=5.0,
        entropy_coef=data.draw(st.sampled_from((0.0, 0.01, -0.2))),
        kl_type=data.draw(st.sampled_from((None, *KL_TYPES))),
        kl_coef=data.draw(st.sampled_from((0.1, -0.3))),
        is_weighted=data.draw(st.booleans()),
        threshold=data.draw(st.sampled_from((None, 0.1))),
    )
    found = PolicyObjective(
        name,
        options,
        loss_agg_mode=mode,
        loss_scale_factor=5.0,
        entropy_coef=chosen.entropy_coef,
        kl_loss_type=chosen.kl_type,
        kl_loss_coef=chosen.kl_coef,
        weights_field="rollout_is_weights" if chosen.is_weighted else None,
        off_policy_mask_threshold=chosen.threshold,
    )
    metrics, gradients = run(
        found, drawn, batch_of(drawn, [0] * 6), split, ("log_probs", "entropy")
    )
    leaves = fresh(drawn)
    loss, wanted = objective(
        responses_of(drawn, leaves["log_probs"], leaves["entropy"], 1), chosen, {}
    )
    check(drawn, metrics, gradients, loss, wanted, leaves)


@settings(max_examples=40)
@given(drawn=batches(), mode=MODES, split=SPLITS, level=st.sampled_from(("action", "chunk")))
def test_actions_and_chunks(drawn: Drawn, mode: str, split: list[int], level: str) -> None:
    found = PolicyObjective(
        loss_agg_mode=mode, loss_scale_factor=5.0, logprob_level=level, action_dim=2
    )
    batch = batch_of(drawn, [0] * 6)
    metrics, gradients = run(found, drawn, batch, split, ("log_probs", "entropy"))
    leaves = fresh(drawn)
    responses = responses_of(
        drawn, leaves["log_probs"], leaves["entropy"], 2 if level == "action" else 3
    )
    chosen = Settings("vanilla", mode=mode, scale=5.0, by_unit=True)
    check(drawn, metrics, gradients, *objective(responses, chosen, {}), leaves)


@settings(max_examples=40)
@given(
    drawn=batches(),
    split=SPLITS,
    # 0, 1/2 and 3/4 of the way to the version of this step's update
    versions=st.lists(st.sampled_from((STEP, STEP - 1, STEP - 3)), min_size=6, max_size=6),
    correction=st.sampled_from(
        (None, ("token", (0.7, 1.2)), ("sequence", 1.5), ("geometric", 1.2))
    ),
)
def test_an_interpolated_proximal_policy(
    drawn: Drawn, split: list[int], versions: list[int], correction: Any
) -> None:
    options = {} if correction is None else {"behav_imp_weight_mode": "disabled"}
    found = PolicyObjective(
        "decoupled",
        options,
        interpolates=True,
        correction=None if correction is None else Correction(*correction),
    )
    assert {"old_log_probs", "prox_alpha"} <= {*found.reads} and "prox_log_probs" not in found.reads
    batch = batch_of(drawn, versions)
    metrics, gradients = run(found, drawn, batch, split, ("log_probs", "entropy"))
    leaves = fresh(drawn)
    responses = responses_of(drawn, leaves["log_probs"], leaves["entropy"], 1, versions)
    chosen = Settings("decoupled", options, correction=correction)
    check(drawn, metrics, gradients, *objective(responses, chosen, {}), leaves)


@settings(max_examples=30)
@given(
    drawn=batches(),
    split=SPLITS,
    loss=st.sampled_from(("vanilla", "gpg")),
    is_corrected=st.booleans(),
    has_old=st.booleans(),
)
def test_old_log_probs_that_are_derived(
    drawn: Drawn, split: list[int], loss: str, is_corrected: bool, has_old: bool
) -> None:
    """In a batch without the column they are the current ones; weights may be computed as well."""
    correction = ("token", 2.0) if is_corrected else None
    found = PolicyObjective(
        loss, derives_old=True, correction=Correction("token", 2.0) if is_corrected else None
    )
    assert "old_log_probs" in found.optional and "old_log_probs" not in found.reads
    batch = batch_of(drawn, [0] * 6)
    if not has_old:
        batch = batch.only(name for name in batch.names if name != "old_log_probs")
    metrics, gradients = run(found, drawn, batch, split, ("log_probs", "entropy"))
    leaves = fresh(drawn)
    responses = responses_of(
        drawn, leaves["log_probs"], leaves["entropy"], 1, derives_old=not has_old
    )
    chosen = Settings(loss, correction=correction)
    check(drawn, metrics, gradients, *objective(responses, chosen, {}), leaves)


@settings(max_examples=40)
@given(drawn=batches(), mode=MODES, split=SPLITS)
def test_losses_of_domains(drawn: Drawn, mode: str, split: list[int]) -> None:
    """All tokens have one mean, and the run's entropy bonus."""
    shared: dict[str, Any] = {"loss_agg_mode": mode, "loss_scale_factor": 5.0}
    own = {
        "code": PolicyObjective("gmpo", {"clip_ratio_low": 0.1}, **shared),
        "chat": PolicyObjective("sapo", {"tau_neg": 2.0}, entropy_coef=9.0, **shared),
    }
    found = PolicyObjective(
        "vanilla", {"clip_ratio_c": None}, entropy_coef=0.01, domains=own, **shared
    )
    batch = batch_of(drawn, [0] * 6)
    metrics, gradients = run(found, drawn, batch, split, ("log_probs", "entropy"))
    leaves = fresh(drawn)
    responses = responses_of(drawn, leaves["log_probs"], leaves["entropy"], 1)
    chosen = Settings("vanilla", {"clip_ratio_c": None}, mode, 5.0, entropy_coef=0.01)
    domains = {
        "code": Settings("gmpo", {"clip_ratio_low": 0.1}),
        "chat": Settings("sapo", {"tau_neg": 2.0}),
    }
    check(drawn, metrics, gradients, *objective(responses, chosen, domains), leaves)


@settings(max_examples=30)
@given(drawn=batches(), mode=MODES, split=SPLITS, kind=st.sampled_from(("mse", "huber")))
def test_the_critic(drawn: Drawn, mode: str, split: list[int], kind: Any) -> None:
    found = ValueObjective(0.3, mode, 5.0, kind, 0.7)
    batch = batch_of(drawn, [0] * 6)
    batch["values"] = batch.flat("rollout_log_probs")
    metrics, gradients = run(found, drawn, batch, split, ("values",))
    leaf = drawn["values"].clone().requires_grad_()

    rows = []
    sums = {"vf_clipfrac": 0.0, "vpred_mean": 0.0}
    for row in range(len(drawn)):
        is_token = drawn.mask[row] > 0
        own, stats = value_loss(
            leaf[row][is_token],
            drawn.of_tokens(row, "rollout_log_probs"),
            drawn.of_tokens(row, "returns"),
            0.3,
            kind,
            0.7,
        )
        rows.append(own)
        for name, values in stats.items():
            sums[name] += float(values.double().sum())

    loss = aggregate(rows, mode, 5.0)
    number = max(float(drawn.mask.sum()), 1.0)
    wanted = {name: total / number for name, total in sums.items()}
    wanted |= dict.fromkeys(("loss", "vf_loss"), float(loss.detach()))
    check(drawn, metrics, gradients, loss, wanted, {"values": leaf})


@settings(max_examples=20)
@given(drawn=batches(), split=SPLITS)
def test_fine_tuning_is_the_mean_negative_log_likelihood(drawn: Drawn, split: list[int]) -> None:
    batch = batch_of(drawn, [0] * 6)
    metrics, gradients = run(SFTObjective(), drawn, batch, split, ("log_probs",))
    leaf = drawn["log_probs"].clone().requires_grad_()
    own = leaf[drawn.mask > 0]
    loss = -own.mean() if len(own) else torch.zeros(())
    check(drawn, metrics, gradients, loss, {"loss": float(loss.detach())}, {"log_probs": leaf})
