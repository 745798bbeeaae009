"""Keys of `actor_rollout_ref.actor`, `actor_rollout_ref.ref` and `critic`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.pipelines.nodes.objectives_from_config import policy_objective
from tests.e2e.keys import optim
from tests.e2e.keys.case import Case, aggregate, close, differ, refused, the_config
from tests.e2e.keys.lab import ACTOR, Run

ONE = ("trainer.total_training_steps=1",)
KL_LOSS = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.optim.lr=0.01")
NORM = (*ONE, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
RATIOS = torch.tensor([[0.5, 1.5, 10.0]])


def loss_of(config: Config, advantage: float, ratios: Tensor = RATIOS) -> float:
    """The policy's loss on three tokens with these ratios."""
    old = (-1.0, -2.0, -3.0)
    sample = Sample(
        "0-0", 0, [Segment("prompt", (1,)), Segment("policy", (5, 6, 7), old, old, (0, 0, 0))]
    )
    batch = Batch.from_samples([sample])
    batch["old_log_probs"] = torch.tensor([old])
    batch["advantages"] = torch.full((1, 3), advantage)
    objective = policy_objective(config)
    outputs = {"log_probs": torch.tensor([old]) + ratios.log(), "entropy": torch.ones(1, 3)}
    loss, _ = objective(outputs, batch, objective.counts(batch))
    return float(loss)


def clips(
    advantage: float, ratios_before: list[float], ratios_after: list[float]
) -> Callable[[Config, Config], None]:
    """The loss is −A times the mean of what the clip leaves of the ratios."""

    def check(before: Config, after: Config) -> None:
        close(loss_of(before, advantage), -advantage * sum(ratios_before) / 3)
        close(loss_of(after, advantage), -advantage * sum(ratios_after) / 3)

    return check


def clip_case(
    name: str, value: str, advantage: float, before: list[float], after: list[float]
) -> Case:
    outcome = "the ratio at which the loss is cut"
    return Case(
        f"{ACTOR}.{name}",
        f"{ACTOR}.{name}={value}",
        outcome,
        clips(advantage, before, after),
        look=the_config,
    )


def far_sequences_with_bad_advantages_get_no_loss(before: Config, after: Config) -> None:
    """The mean of log π_rollout − log π is 1 nat a token."""
    far = torch.full((1, 3), math.exp(-1.0))
    for advantage in (-1.0, 1.0):
        assert loss_of(before, advantage, far) != 0.0
    assert loss_of(after, -1.0, far) == 0.0
    close(loss_of(after, 1.0, far), loss_of(before, 1.0, far))
    close(loss_of(after, -1.0), loss_of(before, -1.0))


def soft_gate(before: Config, after: Config) -> None:
    """SAPO with another tau for positive advantages: −(4/τ) σ(τ(r − 1))."""
    for config, tau in ((before, 1.0), (after, 2.0)):
        gate = torch.sigmoid(tau * (RATIOS.double() - 1)) * 4 / tau
        close(loss_of(config, 1.0), -float(gate.mean()))


def proximal_is_not_scored(before: Run, after: Run) -> None:
    """In a synchronous run no token is stale: the proximal policy is the one that made it."""
    assert "prox_log_probs" in before.batch() and "prox_alpha" not in before.batch()
    assert "prox_log_probs" not in after.batch() and not after.batch()["prox_alpha"].any()
    close(after.batch()["trainer_log_probs"], before.batch()["prox_log_probs"])
    close(after.steps[0]["mismatch/k3"], before.steps[0]["mismatch/k3"])


def plain_gradient(before: Run, after: Run) -> None:
    batch = after.batch()
    close(
        after.column("actor/pg_loss")[0],
        aggregate(-batch["old_log_probs"] * batch["advantages"], batch["loss_mask"], "token-mean"),
    )
    assert "actor/pg_clipfrac" in before.steps[0] and "actor/pg_clipfrac" not in after.steps[0]


def aggregates(mode: str, scale: float = 1.0) -> Callable[[Run, Run], None]:
    """Before the first update the ratio is 1, and the loss of a token −A."""

    def check(before: Run, after: Run) -> None:
        batch = after.batch()
        wanted = aggregate(-batch["advantages"], batch["loss_mask"], mode, scale)
        close(after.column("actor/pg_loss")[0], wanted, 1e-6)
        differ(before.column("actor/grad_norm")[0] / after.column("actor/grad_norm")[0], 1.0, 1e-2)

    return check


def entropy_counts(before: Run, after: Run) -> None:
    step = after.steps[0]
    close(step["actor/loss"], step["actor/pg_loss"] - 0.1 * step["actor/entropy"])
    close(before.steps[0]["actor/loss"], before.steps[0]["actor/pg_loss"])


def kl_is_a_term(before: Run, after: Run) -> None:
    assert before.engine("ref") is None and after.engine("ref") is not None
    assert "actor/kl_loss" not in before.steps[1] and after.steps[1]["actor/kl_loss"] > 0


def kl_weighs(before: Run, after: Run) -> None:
    for run, coefficient in ((before, 0.5), (after, 2.0)):
        step = run.steps[1]
        close(step["actor/loss"], step["actor/pg_loss"] + coefficient * step["actor/kl_loss"])
        assert step["actor/kl_loss"] > 1e-4


def kl_estimated_by(before_rule: Any, after_rule: Any) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, rule in ((before, before_rule), (after, after_rule)):
            batch = run.batch(2)
            estimate = rule((batch["old_log_probs"] - batch["ref_log_prob"]) * batch["loss_mask"])
            close(
                run.steps[1]["actor/kl_loss"],
                aggregate(estimate, batch["loss_mask"], "token-mean"),
                1e-4,
            )

    return check


def reference_in_small_parts(before: Run, after: Run) -> None:
    assert before.largest_forward("ref") > 40 >= after.largest_forward("ref")
    assert after.largest_forward("actor", trains=True) > 40
    close(after.batch()["ref_log_prob"], before.batch()["ref_log_prob"], 1e-5)


def value_loss_of(run: Run, mode: str) -> float:
    """On the first update the prediction is the old value, so that no clip is in reach."""
    batch = run.batch()
    return aggregate(0.5 * (batch["values"] - batch["returns"]).square(), batch["loss_mask"], mode)


def value_loss_aggregates(before: Run, after: Run) -> None:
    close(before.column("critic/vf_loss")[0], value_loss_of(before, "token-mean"), 1e-4)
    close(after.column("critic/vf_loss")[0], value_loss_of(after, "seq-mean-token-sum"), 1e-4)


def value_loss_is_huber(delta: float) -> Any:
    def check(before: Run, after: Run) -> None:
        batch = after.batch()
        size = (batch["values"] - batch["returns"]).abs()
        loss = torch.where(size <= delta, 0.5 * size.square(), delta * (size - 0.5 * delta))
        close(
            after.column("critic/vf_loss")[0],
            aggregate(loss, batch["loss_mask"], "token-mean"),
            1e-4,
        )
        differ(before.column("critic/vf_loss")[0], after.column("critic/vf_loss")[0], 1e-5)

    return check


def values_are_clipped(before: Run, after: Run) -> None:
    assert before.column("critic/vf_clipfrac")[0] == 0.0 < after.column("critic/vf_clipfrac")[0]


def critic_is_another_model(before: Run, after: Run) -> None:
    widths = [run.engine("critic").model.config.hidden_size for run in (before, after)]
    assert widths == [32, 40] and after.engine("actor").model.config.hidden_size == 32


CASES = (
    *optim.cases("actor", "grpo", ACTOR),
    *optim.cases("critic", "ppo", "critic"),
    Case(
        f"{ACTOR}.policy_loss",
        f"{ACTOR}.policy_loss=gpg",
        "actor/pg_loss is −logπ·A",
        plain_gradient,
        given=ONE,
    ),
    Case(
        f"{ACTOR}.policy_loss_kwargs",
        f"+{ACTOR}.policy_loss_kwargs.tau_pos=2.0",
        "the loss",
        soft_gate,
        given=(f"{ACTOR}.policy_loss=sapo",),
        look=the_config,
    ),
    Case(
        f"{ACTOR}.prox",
        f"{ACTOR}.prox=interpolate",
        "prox_log_probs are no column: prox_alpha says how they are made",
        proximal_is_not_scored,
        given=(*ONE, f"{ACTOR}.policy_loss=decoupled"),
    ),
    Case(
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        "actor/pg_loss",
        aggregates("seq-mean-token-mean"),
        given=ONE,
    ),
    Case(
        f"{ACTOR}.loss_scale_factor",
        f"{ACTOR}.loss_scale_factor=2.0",
        "actor/pg_loss",
        aggregates("seq-mean-token-sum-norm", 2.0),
        given=(*NORM, f"{ACTOR}.max_grad_norm=1000"),
    ),
    clip_case("clip_ratio", "0.4", 1.0, [0.5, 1.2, 1.2], [0.5, 1.4, 1.4]),
    clip_case("clip_ratio_low", "0.4", -1.0, [0.8, 1.5, 3.0], [0.6, 1.5, 3.0]),
    clip_case("clip_ratio_high", "0.4", 1.0, [0.5, 1.2, 1.2], [0.5, 1.4, 1.4]),
    clip_case("clip_ratio_c", "5.0", -1.0, [0.8, 1.5, 3.0], [0.8, 1.5, 5.0]),
    Case(
        f"{ACTOR}.off_policy_mask_threshold",
        f"{ACTOR}.off_policy_mask_threshold=0.5",
        "the loss of a sequence that the policy left",
        far_sequences_with_bad_advantages_get_no_loss,
        look=the_config,
        given=(f"{ACTOR}.entropy_coef=0",),
    ),
    Case(
        f"{ACTOR}.entropy_coef",
        f"{ACTOR}.entropy_coef=0.1",
        "actor/loss",
        entropy_counts,
        given=ONE,
    ),
    Case(
        f"{ACTOR}.use_kl_loss",
        f"{ACTOR}.use_kl_loss=true",
        "actor/kl_loss, a reference",
        kl_is_a_term,
    ),
    Case(
        f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_coef=2.0", "actor/loss", kl_weighs, given=KL_LOSS
    ),
    Case(
        f"{ACTOR}.kl_loss_type",
        f"{ACTOR}.kl_loss_type=mse",
        "actor/kl_loss",
        kl_estimated_by(lambda gap: (-gap).exp() - 1 + gap, lambda gap: gap.square() / 2),
        given=KL_LOSS,
    ),
    Case(
        f"{ACTOR}.model_update_frequency",
        f"{ACTOR}.model_update_frequency=2",
        "refused while a sample may not be a step old",
        refused("model_update_frequency", "async.max_staleness"),
    ),
    Case(
        f"{ACTOR}.strategy",
        f"{ACTOR}.strategy=fsdp",
        "refused: one process",
        refused(f"{ACTOR}.strategy", "n_gpus_per_node"),
    ),
    Case(
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=40",
        "tokens of the reference's largest forward",
        reference_in_small_parts,
        given=(*ONE, f"{ACTOR}.use_kl_loss=true", "trust.check_freq=0"),
    ),
    Case(
        "critic.model.path",
        "critic.model.path={lab}/other_model",
        "the critic's model",
        critic_is_another_model,
        base="ppo",
        given=ONE,
    ),
    Case(
        "critic.loss_agg_mode",
        "critic.loss_agg_mode=seq-mean-token-sum",
        "critic/vf_loss",
        value_loss_aggregates,
        base="ppo",
        given=ONE,
    ),
    Case(
        "critic.value_loss",
        ("critic.value_loss=huber", "critic.huber_delta=0.2"),
        "critic/vf_loss: linear from 0.2 on",
        value_loss_is_huber(0.2),
        base="ppo",
        given=ONE,
    ),
    Case(
        "critic.huber_delta",
        "critic.huber_delta=0.1",
        "critic/vf_loss: linear from 0.1 on",
        value_loss_is_huber(0.1),
        base="ppo",
        given=(*ONE, "critic.value_loss=huber"),
    ),
    Case(
        "critic.cliprange_value",
        "critic.cliprange_value=1e-5",
        "critic/vf_clipfrac",
        values_are_clipped,
        base="ppo",
        given=(*ONE, "critic.ppo_epochs=3"),
    ),
)
