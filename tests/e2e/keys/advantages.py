"""Keys of `algorithm` that scale rewards and advantages."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.normalization import Normalization
from distflow.data.batch import Batch
from tests.e2e.keys.algorithm import advantages_of, scores_of
from tests.e2e.keys.case import Case, close, differ
from tests.e2e.keys.lab import Run
from tests.references.normalization import Value, normalise

ONE = "trainer.total_training_steps=1"
ONE_TURN = (
    "actor_rollout_ref.rollout.workflow=multi_turn",
    "actor_rollout_ref.rollout.workflow_kwargs={max_turns: 1}",
)


def scaled_by_the_batch(before: Run, after: Run) -> None:
    scores = scores_of(after.batch())
    means = scores.view(-1, 4).mean(-1).repeat_interleave(4)
    close(advantages_of(after.batch()), (scores - means) / (scores.std() + 1e-6))
    differ(advantages_of(before.batch()), advantages_of(after.batch()))


def by_loops(batch: Batch, values: Tensor, mask: Tensor, norm: Normalization) -> Tensor:
    """The values as AReaL's formula has them."""
    groups = batch["group_index"]
    if norm.group_size is not None:
        groups = groups * 100 + batch["episode_index"] // norm.group_size
    places = ((mask > 0) & batch["valid"].bool()[:, None]).nonzero().tolist()
    sizes = Counter(groups[batch["valid"].bool()].tolist())
    numbers = []
    for row, token in places:
        group = int(groups[row])
        numbers.append(Value(float(values[row, token]), group, sizes[group]))
    options = {**vars(norm)}
    del options["group_size"]
    found = torch.zeros(values.shape, dtype=torch.float64)
    for (row, token), value in zip(places, normalise(numbers, **options), strict=True):
        found[row, token] = value
    return found


def rewards_are_normalised(**options: Any) -> Any:
    """Reinforce without a discount gives every token its sample's reward."""

    def check(before: Run, after: Run) -> None:
        batch = after.batch()
        scores = scores_of(batch)[:, None]
        wanted = by_loops(batch, scores, torch.ones_like(scores), Normalization(**options))
        close(batch["advantages"], wanted * batch["response_mask"])
        close(scores_of(before.batch()), scores[:, 0])
        differ(before.batch()["advantages"], batch["advantages"])

    return check


def advantages_are_normalised(**options: Any) -> Any:
    """Over tokens, of which every sample has another number."""

    def check(before: Run, after: Run) -> None:
        batch = after.batch()
        mask = batch["response_mask"]
        scores = scores_of(batch)
        wanted = by_loops(batch, scores[:, None].expand(mask.shape), mask, Normalization(**options))
        close(batch["advantages"], wanted)
        close(batch["returns"][:, 0], scores)
        differ(before.batch()["advantages"], batch["advantages"])

    return check


def advantages_are_bound(before: Run, after: Run) -> None:
    close(after.batch()["advantages"], before.batch()["advantages"].clamp(-0.5, 0.5))
    assert after.column("advantage_clip/clipped")[0] > 0


def cut_off_are_left_out(before: Run, after: Run) -> None:
    one = before.batch()
    other = after.batch()
    kept = ~other["truncated"]
    assert 0 < int(kept.sum()) < len(other)
    close(other["loss_mask"], one["loss_mask"] * kept[:, None])
    close(other["advantages"], one["advantages"])


def out_of_turns_are_left_out(before: Run, after: Run) -> None:
    one = before.batch()
    other = after.batch()
    out = torch.tensor([reason == "max_turns" for reason in other["finish_reason"]])
    assert 0 < int(out.sum()) < len(one)
    close(other["loss_mask"], one["loss_mask"] * ~out[:, None])
    assert after.column("episodes/ended/max_turns") == [float(out.float().mean())]


def long_errors_are_left_out(before: Run, after: Run) -> None:
    one = before.batch()
    other = after.batch()
    out = ((one["response_mask"] > 0).sum(-1) >= 5) & (one["acc"] < 1)
    assert 0 < int(out.sum()) < len(one)
    close(other["loss_mask"], one["loss_mask"] * ~out[:, None])
    close(other["advantages"], one["advantages"])


def left_out_of_baselines_too(before: Run, after: Run) -> None:
    """GRPO's advantages of the responses that are not truncated, among themselves; a single one has
    none."""
    one = before.batch()
    other = after.batch()
    scores = scores_of(other)
    kept = ~other["truncated"]
    assert 0 < int(kept.sum()) < len(other)
    for rows in torch.arange(len(other)).view(-1, 4):
        left = [int(row) for row in rows if kept[row]]
        own = scores[left].double()
        scale = own.std() + 1e-6 if len(left) > 1 else 1.0
        for row in rows.tolist():
            wanted = (
                (scores[row] - own.mean()) / scale
                if row in left and len(left) > 1
                else torch.zeros(())
            )
            close(other["advantages"][row], wanted * other["response_mask"][row])
            close(other["loss_mask"][row], one["loss_mask"][row] * (row in left and len(left) > 1))
    differ(one["advantages"], other["advantages"])


def rewards_are_whitened(before: Run, after: Run) -> None:
    one = before.batch()
    other = after.batch()
    mask = one["response_mask"] > 0
    tokens = one["token_level_rewards"].double()[mask]
    close(other["token_level_rewards"][mask], (tokens - tokens.mean()) / tokens.std())


def hard_prompts_weigh_more(before: Run, after: Run) -> None:
    one = before.batch()
    other = after.batch()
    weights = 0.5 + 1.5 * (1 - one["acc"].double().view(-1, 4).mean(-1).repeat_interleave(4))
    assert len(weights.unique()) > 1
    close(other["advantages"], one["advantages"] * (weights / weights.mean())[:, None])


# key → the change, and what must be set with it
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean_level": ("group", {}),
    "mean_leave1out": (True, {"mean_level": "group"}),
    "std_level": ("batch", {"mean_level": "group"}),
    "std_unbiased": (False, {"mean_level": "group", "std_level": "group"}),
    "eps": (0.5, {"mean_level": "batch", "std_level": "batch"}),
    "group_size": (2, {"mean_level": "group"}),
}


def cases_of(name: str, outcome: str, checks: Any) -> list[Case]:
    return [
        Case(
            f"algorithm.{name}.{key}",
            f"algorithm.{name}.{key}={str(value).lower()}",
            f"{outcome}, by AReaL's formula",
            checks(**given, **{key: value}),
            given=(
                ONE,
                "algorithm.adv_estimator=reinforce",
                *(f"algorithm.{name}.{k}={v}" for k, v in given.items()),
            ),
        )
        for key, (value, given) in CHANGES.items()
    ]


CASES = (
    Case(
        "algorithm.scale_rewards",
        "algorithm.scale_rewards=batch",
        "advantages: over the standard deviation of all scores",
        scaled_by_the_batch,
        given=(ONE,),
    ),
    Case(
        "algorithm.advantage_clip",
        "algorithm.advantage_clip=0.5",
        "advantages: none beyond it",
        advantages_are_bound,
        given=(ONE,),
    ),
    Case(
        "algorithm.mask_truncated",
        "algorithm.mask_truncated=true",
        "loss_mask: 0 on answers that were cut off",
        cut_off_are_left_out,
        given=(ONE,),
    ),
    Case(
        "algorithm.mask_max_turns",
        "algorithm.mask_max_turns=true",
        "loss_mask: 0 on episodes that ended at their limit of turns",
        out_of_turns_are_left_out,
        given=(ONE, *ONE_TURN),
    ),
    Case(
        "algorithm.mask_long_errors",
        "algorithm.mask_long_errors=5",
        "loss_mask: 0 on long answers that are wrong",
        long_errors_are_left_out,
        given=(ONE,),
    ),
    Case(
        "algorithm.mask_type",
        "algorithm.mask_type=all",
        "advantages: those of the samples that are left, among themselves",
        left_out_of_baselines_too,
        given=(ONE, "algorithm.mask_truncated=true"),
    ),
    Case(
        "algorithm.whiten_rewards",
        "algorithm.whiten_rewards=true",
        "rewards of tokens: mean 0, variance 1",
        rewards_are_whitened,
        given=(ONE, "algorithm.adv_estimator=reinforce"),
    ),
    Case(
        "algorithm.difficulty_weight",
        "algorithm.difficulty_weight=[0.5, 2.0]",
        "advantages: times the weight of their prompt",
        hard_prompts_weigh_more,
        given=(ONE,),
    ),
    *cases_of("reward_norm", "rewards", rewards_are_normalised),
    *cases_of("adv_norm", "advantages", advantages_are_normalised),
)
