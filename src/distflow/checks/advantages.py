"""Check: each sample has the advantages that the registered estimator gives it, and a better score
is a larger advantage in its group."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from distflow.algorithms.registry import find_adv_est
from distflow.checks.check import NOT_APPLICABLE, Wrong, check, is_builtin
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.rewards import parts_of_domain
from distflow.config.keys.reward import scoring_models
from distflow.data.batch import Batch
from distflow.graph import BoundNode
from distflow.import_target import innermost, shown_name
from distflow.rewards.foreign_signatures import DOES_NOT_APPLY
from distflow.rewards.reward_results import Score

LIMIT = 1e-4
LEAST_GAP = 1e-9
MOST_RANKED = 4
RANKED = ("grpo", "gspo", "cpgd", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
"""Estimators with which a better score is a larger advantage than that of another sample of the
group."""


@check(
    "advantages",
    "the estimator, called again, gives the advantages and returns that the samples have, of its "
    "scope: with the scope group for one group alone, which other groups must not change; in a "
    "group a better score, as the reward functions gave it for the sample's text, is a larger "
    "advantage",
    needs="an estimator of the training loop; for your own a difference is a warning",
    limit=f"{LIMIT:g}",
)
def check_advantages(recorded: RecordedStep) -> str | None:
    """Called when the node of the estimator has run."""
    nodes = recorded.run.pipeline.nodes
    node = next((node for node in nodes if "advantages" in node.contract.writes), None)
    if node is None or "advantages" not in recorded.batch:
        return NOT_APPLICABLE
    batch = recorded.batch
    rows = list(range(len(batch)))
    if node.contract.scope != "global":
        if not rows:  # other ranks have all samples of the step
            return None
        # alone it is as wide as the batch
        groups = batch["group_index"].tolist()
        longest = groups[int(batch.lengths("response").argmax())]
        rows = [row for row, group in enumerate(groups) if group == longest]
    alone = batch.select(rows)
    again = _tensors(recorded.run.call_estimator(alone), alone)
    if not again:
        return "no estimator of the training loop writes advantages"
    for name, values in zip(("advantages", "returns"), again, strict=False):
        if name not in alone:
            continue
        wrong = _first_wrong(alone, alone[name], values)
        if wrong is None:
            continue
        if not is_builtin(node.fn):
            recorded.run.warn(_users_fault(node, len(rows) < len(batch)))
            return "the estimator is yours, and does not depend on its group alone"
        row, token = wrong
        raise Wrong(
            f"{name} of sample {alone['uid'][row]} is {float(alone[name][row, token]):g} at token "
            f"{token}, but the estimator, called again, gives {float(values[row, token]):g}: "
            "advantages were assigned to other samples, or changed after they were computed"
        )
    return None


def _first_wrong(batch: Batch, found: Tensor, wanted: Tensor) -> tuple[int, int] | None:
    """Row and token of the first difference under the mask."""
    mask = batch["response_mask"] > 0
    gap = (found.double() - wanted.double()).abs()
    same = (gap <= LIMIT * wanted.double().abs().clamp(min=1.0)) | (found.isnan() & wanted.isnan())
    places = (mask & ~same).nonzero()
    return (int(places[0, 0]), int(places[0, 1])) if len(places) else None


def _tensors(output: object, batch: Batch) -> list[Tensor]:
    """The returned tensors, `(bs, response_length)`."""
    output = getattr(output, "batch", output)
    if isinstance(output, Mapping | Batch):
        output = [output[name] for name in ("advantages", "returns") if name in output]
    values = output if isinstance(output, tuple | list) else (output,)
    found = list[Tensor]()
    for each in values:
        if isinstance(each, Tensor):
            found.append(batch.pad(each, "response") if each.dim() == 1 else each)
    return found


def _users_fault(node: BoundNode, is_alone: bool) -> str:
    name = f"the estimator {shown_name(innermost(node.fn))}"
    if is_alone:
        return (
            f"{name} mixes groups: for one group alone it gives different advantages than in the "
            'batch. If that is intended, register it with scope="global"; else multiply by the '
            "mask before summing, and make it deterministic"
        )
    return (
        f"{name} is not deterministic: a second call with the same arguments gives different "
        "advantages; or something changes them after it"
    )


def check_order(recorded: RecordedStep) -> None:
    """Check that in one drawn group a better score is a larger advantage. Reads so little that
    every step has it."""
    if not _is_ordered(recorded):
        return
    batch = recorded.batch
    lengths = batch.lengths("response")
    starts = lengths.cumsum(0) - lengths
    groups = batch["group_index"].unique().tolist()
    drawn = random.Random(recorded.step).sample(groups, min(MOST_RANKED, len(groups)))
    for group in drawn:
        rows = ((batch["group_index"] == group) & (lengths > 0)).nonzero()[:, 0].tolist()
        scores = _given_scores(recorded, group, rows)
        if len({*scores.values()}) < 2:
            continue
        first = starts[[*scores]]
        advantages = batch.flat("advantages")[first].tolist()
        counts = batch.flat("loss_mask")[first].tolist()
        every = zip(scores.values(), advantages, scores, counts, strict=True)
        counted = sorted(each for each in every if each[-1] > 0)
        for (low, less, *_), (high, more, row, _) in pairwise(counted):
            if high - low > LEAST_GAP * max(abs(high), 1.0) and not less < more:
                raise Wrong(
                    f"sample {batch['uid'][row]} has the score {high:g} by its reward functions "
                    f"and the advantage {more:g}, but another of its group the lower score {low:g} "
                    f"and the advantage {less:g}: scores or advantages are assigned to other "
                    "samples, or their sign is flipped"
                )
        return


def _is_ordered(recorded: RecordedStep) -> bool:
    """Whether a better score is a larger advantage within a group, by the config."""
    config = recorded.config
    settings = config.algorithm
    is_changed = (
        settings.use_kl_in_reward
        or settings.whiten_rewards
        or settings.reward_scale <= 0
        or settings.reward_clip is not None
        or settings.advantage_clip is not None
        or settings.difficulty_weight is not None
        or settings.length_weight is not None
        or settings.domains
        or config.reward.overlong.buffer_tokens
        or scoring_models(config.reward_model)
        or config.actor_rollout_ref.rollout.workflow is not None
    )
    if is_changed or settings.adv_estimator not in RANKED or "advantages" not in recorded.batch:
        return False
    if not is_builtin(find_adv_est(settings.adv_estimator).fn):
        return False
    names = ["advantages", "scores", "responses", "reward_parts"]
    names += filter(recorded.is_written, ("token_level_scores", "token_level_rewards"))
    return all(map(recorded.is_ours, names))


def _given_scores(recorded: RecordedStep, group: int, rows: Sequence[int]) -> dict[int, float]:
    """By row, the weighted sum of the scores that were given for its text; only of samples with a
    score of each function."""
    record = recorded.records.get(group)
    batch = recorded.batch
    found = dict[int, float]()
    if record is None or not rows:
        return found
    given = dict[tuple[str, object], set[float]]()
    for name, arguments, own in record.scored:
        if isinstance(own, Score) and DOES_NOT_APPLY not in own.extra:
            given.setdefault((name, arguments.get("solution_str")), set()).add(own.value)
    parts = parts_of_domain(recorded.config, batch["domain"][rows[0]])
    texts = batch["responses"]
    for row in rows:
        if batch["reward_errors"][row] is not None or not batch["valid"][row]:
            continue
        scores = [given.get((part.name, texts[row]), set()) for part in parts]
        if all(len(own) == 1 for own in scores):
            pairs = zip(parts, scores, strict=True)
            found[row] = sum(part.weight * min(own) for part, own in pairs)
    return found
