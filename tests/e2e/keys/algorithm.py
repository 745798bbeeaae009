"""Keys of `algorithm`."""

from typing import Any

import torch
from torch import Tensor

from distflow.data.batch import Batch
from tests.e2e.keys.case import Case, allowed, close, differ, refused
from tests.e2e.keys.lab import ACTOR, MODEL, ROLLOUT, Run

NO_KL = ("algorithm.use_kl_in_reward=false",)
ADAPTIVE = (
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.target_kl=0.1",
    "algorithm.kl_ctrl.horizon=100",
)
BFLOAT16 = (
    f"{MODEL}.dtype=bfloat16",
    "actor_rollout_ref.rollout.enforce_eager=true",  # native code rounds as the trainer does
    "trainer.total_training_steps=1",
    "trust.canary_freq=0",
)
CORRECTION = "algorithm.rollout_correction"
TOKEN_WEIGHTS = (
    *BFLOAT16,
    f"{CORRECTION}.rollout_is=token",
    f"{CORRECTION}.rollout_is_threshold=100",
)
REJECTION = (f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=1e-6")


def scores_of(batch: Batch) -> Tensor:
    return batch["token_level_scores"].sum(-1).double()


def advantages_of(batch: Batch) -> Tensor:
    """One a sample: those of its first token."""
    return batch["advantages"][:, 0].double()


def by_group(batch: Batch, rule: Any) -> Tensor:
    """A rule of each group's scores, for every sample."""
    scores = scores_of(batch)
    groups = batch["group_index"]
    out = torch.zeros(len(batch)).double()
    for group in groups.unique():
        out[groups == group] = rule(scores[groups == group])
    return out


def advantages_are(rule: Any) -> Any:
    def check(before: Run, after: Run) -> None:
        close(advantages_of(after.batch()), by_group(after.batch(), rule))
        differ(advantages_of(before.batch()), advantages_of(after.batch()))

    return check


def rloo(scores: Tensor) -> Tensor:
    return scores - (scores.sum() - scores) / (len(scores) - 1)


def advantages_halve(before: Run, after: Run) -> None:
    close(advantages_of(before.batch()), 2 * advantages_of(after.batch()))


def program_is(before_id: str, after_id: str) -> Any:
    def check(before: Run, after: Run) -> None:
        assert (before.spec.plan.pipeline, after.spec.plan.pipeline) == (before_id, after_id)

    return check


def rewards_to_go_discounted(before: Run, after: Run) -> None:
    batch = after.batch()
    gamma = 0.5
    for i, length in enumerate(batch.lengths("response").tolist()):
        expected = scores_of(batch)[i] * gamma ** torch.arange(length - 1, -1, -1)
        close(batch["returns"][i, :length], expected)
    close(before.batch()["returns"][:, 0], scores_of(before.batch()))


def returns_look_one_token_ahead(before: Run, after: Run) -> None:
    batch = after.batch()
    for i, length in enumerate(batch.lengths("response").tolist()):
        close(batch["returns"][i, : length - 1], batch["values"][i, 1:length])
    differ(before.batch()["returns"], batch["returns"])


def truncated_ones_end_in_their_value(before: Run, after: Run) -> None:
    for run, adds_value in ((before, 0.0), (after, 1.0)):
        batch = run.batch()
        last = batch.lengths("response") - 1
        rows = torch.arange(len(batch))
        expected = scores_of(batch) + adds_value * batch["truncated"] * batch["values"][rows, last]
        close(batch["returns"][rows, last], expected)
        assert 0 < int(batch["truncated"].sum()) < len(batch)


def penalty_is(estimate: Any) -> Any:
    """Rewards are scores less coefficient · estimate(log-ratio), in the step in which there is a
    KL."""

    def check(before: Run, after: Run) -> None:
        batch = after.batch(2)
        gap = (batch["old_log_probs"] - batch["ref_log_prob"]) * batch["response_mask"]
        penalty = batch["token_level_scores"] - batch["token_level_rewards"]
        close(penalty, after.column("actor/kl_coef")[1] * estimate(gap), 1e-6)
        differ(before.batch(2)["token_level_rewards"], batch["token_level_rewards"])

    return check


def no_penalty(before: Run, after: Run) -> None:
    batch = after.batch(2)
    close(batch["token_level_rewards"], batch["token_level_scores"])
    differ(before.batch(2)["token_level_rewards"], before.batch(2)["token_level_scores"])
    assert after.engine("ref") is None and "actor/reward_kl_penalty" not in after.steps[1]


def coefficient_starts_at(value: float) -> Any:
    def check(before: Run, after: Run) -> None:
        assert before.column("actor/kl_coef")[0] != after.column("actor/kl_coef")[0] == value

    return check


def coefficients_are(target: float, horizon: float) -> Any:
    """arXiv:1909.08593: the error is clipped to ±0.2, a step of n samples moves by 1 + error · n /
    horizon."""

    def check(before: Run, after: Run) -> None:
        coefficients = after.column("actor/kl_coef")
        measured = after.column("actor/reward_kl_penalty")
        for now, following, kl in zip(coefficients, coefficients[1:], measured, strict=False):
            close(following, now * (1 + max(-0.2, min(0.2, kl / target - 1)) * 16 / horizon), 1e-9)
        assert before.column("actor/kl_coef") != coefficients

    return check


def the_kl_shown_is_the_mean_of_means(before: Run, after: Run) -> None:
    for run, of_sequences in ((before, False), (after, True)):
        batch = run.batch(2)
        mask = batch["response_mask"]
        kl = (batch["old_log_probs"] - batch["ref_log_prob"]).double() * mask
        mean = (kl.sum(-1) / mask.sum(-1)).mean() if of_sequences else kl.sum() / mask.sum()
        close(run.column("actor/reward_kl_penalty")[1], mean)
    shown = [run.column("actor/reward_kl_penalty")[1] for run in (before, after)]
    differ(*shown, 1e-6)


def weights_are(rule: Any) -> Any:
    """Correction weights of each sequence from its log-ratios."""

    def check(before: Run, after: Run) -> None:
        batch = after.batch()
        mask = batch["response_mask"]
        gap = (batch["old_log_probs"].double() - batch["rollout_log_probs"].double()) * mask
        close(batch["rollout_is_weights"] * mask, rule(gap, mask) * mask, 1e-5)
        own = before.batch()
        if "rollout_is_weights" in own:
            differ(own["rollout_is_weights"], batch["rollout_is_weights"], 1e-4)

    return check


def loss_weighed_by(weight: float) -> Any:
    """Every weight is the cap, so that the gradient shrinks to that share."""

    def check(before: Run, after: Run) -> None:
        assert float(after.batch()["rollout_is_weights"].max()) == weight
        close(
            after.column("actor/grad_norm")[0], weight * before.column("actor/grad_norm")[0], 2e-2
        )

    return check


def outside_the_band_counts_nothing(before: Run, after: Run) -> None:
    batch = after.batch()
    mask = after.batch()["response_mask"]
    ratios = before.batch()["rollout_is_weights"][mask > 0]
    weights = batch["rollout_is_weights"][mask > 0]
    assert 0 < int((ratios < 1.0).sum()) < len(ratios)
    close(weights, torch.where(ratios < 1.0, 0.0, ratios))


def weights_have_the_mean_one(before: Run, after: Run) -> None:
    mask = after.batch()["response_mask"]
    weights = before.batch()["rollout_is_weights"].double()
    mean = float((weights * mask).sum() / mask.sum())
    close(after.batch()["rollout_is_weights"] * mask, weights * mask / mean, 1e-6)
    differ(mean, 1.0, 1e-6)
    close(after.steps[0]["rollout_corr/rollout_is_batch_norm_factor"], mean, 1e-6)


def the_rollouts_are_the_old_ones(before: Run, after: Run) -> None:
    """In bfloat16 the trainer's own are others."""
    for run, equal in ((before, False), (after, True)):
        assert torch.equal(run.batch()["old_log_probs"], run.batch()["rollout_log_probs"]) is equal
    close(before.batch()["old_log_probs"], after.batch()["trainer_log_probs"])


def far_tokens_leave_the_loss(before: Run, after: Run) -> None:
    batch = after.batch()
    mask = batch["response_mask"]
    gap = (batch["old_log_probs"].double() - batch["rollout_log_probs"].double()) * mask
    kept = mask * (gap.square() / 2 <= 1e-6)
    assert torch.equal(batch["loss_mask"], kept) and torch.equal(before.batch()["loss_mask"], mask)
    assert 0 < int(kept.sum()) < int(mask.sum())
    close(after.steps[0]["rejection/masked"], 1 - float(kept.sum() / mask.sum()), 1e-6)


def no_group_is_flat(before: Run, after: Run) -> None:
    def flat(run: Run) -> int:
        return sum(
            int(torch.unique(row).numel() == 1) for row in scores_of(run.batch()).view(-1, 4)
        )

    assert flat(before) > 0 and flat(after) == 0
    assert (
        after.column("async/dropped/all_equal")[0] > 0
        and "async/dropped/all_equal" not in before.steps[0]
    )


def groups_differ_in_format(before: Run, after: Run) -> None:
    def mixed(run: Run) -> list[bool]:
        parts = torch.tensor([part["format"] for part in run.batch()["reward_parts"]]).view(-1, 4)
        return [len(row.unique()) > 1 for row in parts]

    assert all(mixed(after)) and not all(mixed(before))


def the_step_is_short(before: Run, after: Run) -> None:
    assert "max_num_gen_batches" in str(before.error)
    assert 0 < len(after.batch().lengths("response")) < 16


def some_are_ended_early(before: Run, after: Run) -> None:
    assert after.column("async/aborted")[0] == 2 and "async/aborted" not in before.steps[0]
    assert after.column("async/enqueued")[0] == before.column("async/enqueued")[0] + 2


FLAT_MIX = ("data.shuffle=false", "trainer.total_training_steps=1")
CASES = (
    Case(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator=rloo",
        "advantages",
        advantages_are(rloo),
    ),
    Case(
        "algorithm.adv_estimator_kwargs",
        "+algorithm.adv_estimator_kwargs.f_norm=2",
        "advantages halve",
        advantages_halve,
        given=("algorithm.adv_estimator=gpg",),
    ),
    Case(
        "algorithm.workflow_type",
        "algorithm.workflow_type=DAPO",
        "the pipeline",
        program_is("grpo_training_pipeline", "dapo_training_pipeline"),
        given=("~dag.pipeline",),
    ),
    Case(
        "algorithm.gamma",
        "algorithm.gamma=0.5",
        "returns, discounted",
        rewards_to_go_discounted,
        base="ppo",
        given=(*NO_KL, "algorithm.lam=1.0"),
    ),
    Case(
        "algorithm.lam",
        "algorithm.lam=0",
        "returns: the next value alone",
        returns_look_one_token_ahead,
        base="ppo",
        given=NO_KL,
    ),
    Case(
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "advantages: score less mean",
        advantages_are(lambda scores: scores - scores.mean()),
    ),
    Case(
        "algorithm.adv_epsilon",
        "algorithm.adv_epsilon=1.0",
        "advantages: over std + 1",
        advantages_are(lambda scores: (scores - scores.mean()) / (scores.std() + 1.0)),
    ),
    Case(
        "algorithm.allow_group_of_one",
        "algorithm.allow_group_of_one=true",
        "a group of one runs",
        allowed("rollout.n", "allow_group_of_one"),
        given=(f"{ROLLOUT}.n=1",),
    ),
    Case(
        "algorithm.bootstrap_truncated",
        "algorithm.bootstrap_truncated=true",
        "the last return of a truncated response",
        truncated_ones_end_in_their_value,
        base="ppo",
        given=(*NO_KL, "algorithm.lam=0"),
    ),
    Case(
        "algorithm.use_kl_in_reward",
        "algorithm.use_kl_in_reward=false",
        "rewards are the scores; no reference is built",
        no_penalty,
        base="ppo",
    ),
    Case(
        "algorithm.kl_penalty",
        "algorithm.kl_penalty=abs",
        "rewards of tokens: less |log-ratio|",
        penalty_is(torch.abs),
        base="ppo",
        given=("algorithm.kl_ctrl.kl_coef=1.0", f"{ACTOR}.optim.lr=0.01"),
    ),
    Case(
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "actor/kl_coef",
        coefficient_starts_at(0.5),
        base="ppo",
    ),
    Case(
        "algorithm.kl_ctrl.type",
        ADAPTIVE,
        "actor/kl_coef follows a target",
        coefficients_are(0.1, 100),
        base="ppo",
    ),
    Case(
        "algorithm.kl_ctrl.target_kl",
        "algorithm.kl_ctrl.target_kl=1e-9",
        "actor/kl_coef grows",
        coefficients_are(1e-9, 100),
        base="ppo",
        given=(*ADAPTIVE, "algorithm.kl_penalty=abs", "trainer.total_training_steps=3"),
    ),
    Case(
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.horizon=50",
        "actor/kl_coef moves twice as far",
        coefficients_are(0.1, 50),
        base="ppo",
        given=ADAPTIVE,
    ),
    Case(
        "algorithm.kl_ctrl.mean",
        "algorithm.kl_ctrl.mean=sequence",
        "actor/reward_kl_penalty: the mean of the sequences' means",
        the_kl_shown_is_the_mean_of_means,
        base="ppo",
        given=(*ADAPTIVE, f"{ACTOR}.optim.lr=0.01"),
    ),
    Case(
        "algorithm.recompute_old_log_probs",
        "algorithm.recompute_old_log_probs=false",
        "old_log_probs: the rollout's",
        the_rollouts_are_the_old_ones,
        given=BFLOAT16,
    ),
    Case(
        f"{CORRECTION}.rollout_is",
        f"{CORRECTION}.rollout_is=sequence",
        "rollout_is_weights: the product over a sequence",
        weights_are(lambda gap, mask: gap.sum(-1, keepdim=True).exp().expand_as(gap)),
        given=TOKEN_WEIGHTS,
    ),
    Case(
        f"{CORRECTION}.rollout_is_threshold",
        f"{CORRECTION}.rollout_is_threshold=[0,1.0]",
        "rollout_is_weights above the band are 0",
        weights_are(lambda gap, mask: torch.where(gap.exp() > 1.0, 0.0, gap.exp())),
        given=(*TOKEN_WEIGHTS, f"{CORRECTION}.rollout_is_threshold=1.0"),
    ),
    Case(
        f"{CORRECTION}.rollout_is_threshold",
        f"{CORRECTION}.rollout_is_threshold=0.5",
        "the gradient halves",
        loss_weighed_by(0.5),
        given=TOKEN_WEIGHTS,
    ),
    Case(
        f"{CORRECTION}.rollout_is_threshold",
        f"{CORRECTION}.rollout_is_threshold=[1.0,100]",
        "rollout_is_weights below the band are 0",
        outside_the_band_counts_nothing,
        given=TOKEN_WEIGHTS,
    ),
    Case(
        f"{CORRECTION}.rollout_is_batch_normalize",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        "rollout_is_weights over their mean",
        weights_have_the_mean_one,
        given=TOKEN_WEIGHTS,
    ),
    Case(
        f"{CORRECTION}.rollout_rs",
        REJECTION,
        "loss_mask: 0 where the mismatch is large",
        far_tokens_leave_the_loss,
        given=BFLOAT16,
    ),
    Case(
        f"{CORRECTION}.rollout_rs_threshold",
        f"{CORRECTION}.rollout_rs_threshold=1e-6",
        "loss_mask: 0 where the mismatch is above it",
        far_tokens_leave_the_loss,
        given=(*BFLOAT16, *REJECTION[:1], f"{CORRECTION}.rollout_rs_threshold=1000"),
    ),
    Case(
        "algorithm.filter_groups.enable",
        "algorithm.filter_groups.enable=true",
        "groups of equal scores are replaced",
        no_group_is_flat,
        base="dapo",
        given=(*FLAT_MIX, "algorithm.filter_groups.enable=false"),
    ),
    Case(
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.metric=format",
        "groups differ in that reward part",
        groups_differ_in_format,
        base="dapo",
        given=(
            "reward.functions.default=[custom,{name: format, weight: 0}]",
            "trainer.total_training_steps=1",
        ),
    ),
    Case(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_num_gen_batches=1",
        "the step cannot be filled",
        refused("max_num_gen_batches"),
        base="dapo",
        given=FLAT_MIX,
    ),
    Case(
        "algorithm.filter_groups.when_exhausted",
        "algorithm.filter_groups.when_exhausted=continue",
        "a step with fewer samples",
        the_step_is_short,
        base="dapo",
        given=(*FLAT_MIX, "algorithm.filter_groups.max_num_gen_batches=1"),
    ),
    Case(
        "algorithm.filter_groups.oversampling",
        "algorithm.filter_groups.oversampling=0.5",
        "groups ended early",
        some_are_ended_early,
    ),
)
