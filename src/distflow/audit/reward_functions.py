"""Check: a sample's scores are its own, and its reward functions give them again."""

import time
from collections.abc import Sequence
from typing import Any

from distflow.audit.recorded_data import NOT_APPLICABLE, RecordedStep, Sample, Wrong, check
from distflow.audit.recorder import GroupRecord
from distflow.config.per_domain import reward_functions
from distflow.rewards.functions import FAILS
from distflow.rewards.score import RewardResult, Score

MOST = 16
TRIES, MOST_TWICE = 6, 4
_DECIDES_WITHIN_S = 5.0
"""Minimum time to find the cause of a difference, so that a busy machine is not taken for a nondeterministic
function."""


@check(
    "reward_results",
    "each reward function was called with the sample's own text and ground truth, and its score is on the sample, and "
    "the same in a second call",
    needs="deterministic functions of reward.functions; for those that score a group at a time only their arguments "
    "are checked",
    limit=f"equal, {MOST} samples, as far as the time allows",
)
def audit_reward_functions(recorded: RecordedStep) -> str | None:
    if recorded.run.resources.reward_fn is None or not recorded.is_ours("reward_parts"):
        return "no built-in reward node scores" if recorded.is_written("scores") else NOT_APPLICABLE
    arguments = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}
    failed = recorded.run.call_reward(FAILS, arguments)
    if isinstance(failed, Score):
        raise Wrong(f"a reward function that raises must give no score, but it gave {failed.value}")
    began, seen = time.monotonic(), 0
    differing: list[tuple[Sample, str, str]] = []
    for sample in recorded.some_samples(MOST):
        record = recorded.record_of(sample)
        budget_s = max(recorded.budget_s, _DECIDES_WITHIN_S) if differing else recorded.budget_s
        if record is None or time.monotonic() - began > budget_s:
            continue
        for name in functions_of(recorded, sample):
            if name not in recorded.run.state.get("not_deterministic", []):
                what = _compare(recorded, record, sample, name)
                differing += [(sample, name, what)] if what is not None else []
                seen += 1
    _explain_differences(recorded, differing, seen)
    return None if seen else "no reward function could be called again in time, or none is deterministic"


def functions_of(recorded: RecordedStep, sample: Sample) -> dict[str, float]:
    """Names and weights of the reward functions of the sample's domain."""
    functions = reward_functions(recorded.config)
    parts = functions.get(sample["domain"]) or functions.get("default") or ()
    return {part.name: part.weight for part in parts}


def _compare(recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str) -> str | None:
    """How the sample's score differs from a new one; raises Wrong if the sample was scored by another text, or holds
    another sample's score."""
    wanted = _arguments(recorded, sample)
    own = [
        result
        for called, given, result in record.scored
        if called == name
        and {**{key: given.get(key) for key in wanted}, "extra_info": given.get("extra_info") or {}} == wanted
    ]
    if not own:
        text, truth = wanted["solution_str"][:80], str(wanted["ground_truth"])[:80]
        raise Wrong(
            f"reward function '{name}' was never called with the response of sample {sample['uid']} ({text!r}) and the "
            f"ground truth ({truth!r}), domain and extra_info of its row: the sample was scored by another's"
        )
    # A sample with a reward error may be valid: reward.on_error can give it a score.
    score, valid = sample["reward_parts"].get(name), bool(sample["valid"]) and sample.get("reward_errors") is None
    if valid and not any(isinstance(v, Score) and v.value == score for v in own):
        raise Wrong(
            f"sample {sample['uid']} has the score {score} of reward function '{name}', which gave {_shown(own)} for "
            "its response: scores are on other samples, or a missing one was counted"
        )
    if not valid and sample.get("reward_errors") is None:
        raise Wrong(f"sample {sample['uid']} is marked as having no score, without a reward error")
    reward_fn = recorded.run.resources.reward_fn
    if reward_fn is not None and name in reward_fn.pools.takes_groups:
        return None  # alone it may get another score than in its group
    again = recorded.run.call_reward(name, wanted)
    if not valid or not isinstance(again, Score) or again.value == score:
        return None
    return f"the score was {score}, and is {_shown([again])} in a second call"


def _explain_differences(recorded: RecordedStep, differing: Sequence[tuple[Sample, str, str]], num_called: int) -> None:
    """Samples have recorded scores that the reward function does not give again. If many differ, and the function is
    consistent over repeated calls, scores were given to other samples before they were recorded; else the function is
    not deterministic, and is left out from here on."""
    for name in sorted({name for _, name, _ in differing}):
        of_this = [(sample, what) for sample, other, what in differing if other == name]
        sample, what = of_this[0]
        if len(of_this) >= max(3, num_called / 4) and _are_swapped(recorded, name, [s for s, _ in of_this]):
            raise Wrong(
                f"sample {sample['uid']}: {what} by reward function '{name}', and {len(of_this) - 1} more samples "
                "differ: each has the score of another. Scores were given to other samples"
            )
        recorded.run.state.setdefault("not_deterministic", []).append(name)
        recorded.run.warn(
            f"reward function '{name}' is not deterministic: for sample {sample['uid']} {what}. Its scores cannot be "
            "checked, and are left out of the audit from here on"
        )


def _are_swapped(recorded: RecordedStep, name: str, samples: Sequence[Sample]) -> bool:
    """Whether the reward function is consistent over repeated calls, within the time budget, and the samples have its
    scores of other samples."""
    began, few = time.monotonic(), samples[:MOST_TWICE]
    calls = [_arguments(recorded, sample) for sample in few]
    scores = [_shown([recorded.run.call_reward(name, call)]) for call in calls]
    for _ in range(TRIES - 1):
        if time.monotonic() - began > max(recorded.budget_s, _DECIDES_WITHIN_S):
            return False
        if scores != [_shown([recorded.run.call_reward(name, call)]) for call in calls]:
            return False
    differ = {sample["uid"] for sample in samples}
    others = [sample for sample in recorded.some_samples(MOST) if sample["uid"] not in differ]
    known = {*scores, *(str(sample["reward_parts"].get(name)) for sample in others)}
    return all(str(sample["reward_parts"].get(name)) in known for sample in few)


def _arguments(recorded: RecordedStep, sample: Sample) -> dict[str, Any]:
    """Of a call for the sample alone, by its row and its tokens."""
    row = recorded.run.spec.rows[recorded.records[int(sample["group_index"])].prompt_group.row]
    text = str(recorded.run.resources.tokenizer.decode(sample["response_ids"].tolist(), skip_special_tokens=True))
    truth, extra_info = row.ground_truth, row.extra_info or {}
    return {"data_source": row.domain, "solution_str": text, "ground_truth": truth, "extra_info": extra_info}


def _shown(results: Sequence[RewardResult]) -> str:
    return ", ".join(str(each.value) if isinstance(each, Score) else f"no score ({each})" for each in results)
