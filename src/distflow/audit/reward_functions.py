"""Check: a sample's scores are its own, and its reward functions give them again."""

import time
from collections.abc import Sequence

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
            if name in recorded.run.state.get("not_deterministic", []):
                continue
            what = _compare(recorded, record, sample, name)
            if what is not None:
                differing.append((sample, name, what))
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
    row = recorded.run.spec.rows[record.prompt_group.row]
    text = _text(recorded, sample)
    own = [
        reward_result
        for called, arguments, reward_result in record.scored
        if called == name
        and arguments["solution_str"] == text
        and arguments["ground_truth"] == row.ground_truth
        and arguments.get("data_source") == row.domain
        and (arguments.get("extra_info") or {}) == (row.extra_info or {})
    ]
    if not own:
        raise Wrong(
            f"reward function '{name}' was never called with the response of sample {sample['uid']} ({text[:80]!r}) "
            f"and the ground truth ({str(row.ground_truth)[:80]!r}), domain and extra_info of its row: the sample was "
            "scored by another's"
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
    again = _call(recorded, sample, name)
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
    budget_s = max(recorded.budget_s, _DECIDES_WITHIN_S)
    scores = [_shown([_call(recorded, sample, name)]) for sample in few]
    for _ in range(TRIES - 1):
        if time.monotonic() - began > budget_s or scores != [_shown([_call(recorded, s, name)]) for s in few]:
            return False
    differ = {sample["uid"] for sample in samples}
    others = [sample for sample in recorded.some_samples(MOST) if sample["uid"] not in differ]
    known = {*scores, *(str(sample["reward_parts"].get(name)) for sample in others)}
    return all(str(sample["reward_parts"].get(name)) in known for sample in few)


def _text(recorded: RecordedStep, sample: Sample) -> str:
    return str(recorded.run.resources.tokenizer.decode(sample["response_ids"].tolist(), skip_special_tokens=True))


def _call(recorded: RecordedStep, sample: Sample, name: str) -> RewardResult:
    """Call with plain arguments of the row, one sample at a time."""
    row = recorded.run.spec.rows[recorded.records[int(sample["group_index"])].prompt_group.row]
    return recorded.run.call_reward(
        name,
        {
            "data_source": row.domain,
            "solution_str": _text(recorded, sample),
            "ground_truth": row.ground_truth,
            "extra_info": row.extra_info or {},
        },
    )


def _shown(reward_results: Sequence[RewardResult]) -> str:
    return ", ".join(
        str(reward_result.value) if isinstance(reward_result, Score) else f"no score ({reward_result})"
        for reward_result in reward_results
    )
