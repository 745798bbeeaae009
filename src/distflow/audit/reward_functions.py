"""Claim: a sample's verdicts are its own, and come out again."""

import time
from collections.abc import Sequence

from distflow.audit.check import Check, Wrong
from distflow.audit.recorded_data import RecordedStep, Sample
from distflow.audit.recorder import GroupRecord
from distflow.config.per_domain import reward_functions
from distflow.rewards.functions import FAILS
from distflow.rewards.score import RewardResult, Score

MOST = 16
TRIES, MOST_TWICE = 6, 4
_DECIDES_WITHIN_S = 5.0
"""At least, of what a difference comes: a busy machine must not pass for a verifier that contradicts itself."""


def prove(recorded: RecordedStep) -> str | None:
    if recorded.parts.reward_fn is None or not recorded.is_ours("reward_parts"):
        return "no built-in reward node judges" if recorded.is_written("scores") else ""
    failed = recorded.parts.reward_fn(
        FAILS, {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}
    )
    if isinstance(failed, Score):
        raise Wrong(f"a verifier that raises must give no verdict, but it gave {failed.value}")
    began, seen = time.monotonic(), 0
    differing: list[tuple[Sample, str, str]] = []
    for sample in recorded.proved(MOST):
        record = recorded.records.get(int(sample["group_index"]))
        budget_s = max(recorded.budget_s, _DECIDES_WITHIN_S) if differing else recorded.budget_s
        if record is None or time.monotonic() - began > budget_s:
            continue
        for name in functions_of(recorded, sample):
            if name in recorded.state.get("not_deterministic", []):
                continue
            what = _compare(recorded, record, sample, name)
            if what is not None:
                differing.append((sample, name, what))
            seen += 1
    _judge_differences(recorded, differing, seen)
    return None if seen else "no verifier could be asked again in time, or none is deterministic"


def functions_of(recorded: RecordedStep, sample: Sample) -> dict[str, float]:
    """Names and weights of the verifiers of the sample's domain."""
    functions = reward_functions(recorded.config)
    parts = functions.get(sample["domain"]) or functions.get("default") or ()
    return {part.name: part.weight for part in parts}


def _compare(recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str) -> str | None:
    """What differs between the sample's verdict and a new one; raises Wrong where the sample was judged on another's
    text, or holds another verdict than its own."""
    row = recorded.parts.rows[record.prompt_group.row]
    text = _text(recorded, sample)
    own = [
        reward_result
        for asked, arguments, reward_result in record.judged
        if asked == name
        and arguments["solution_str"] == text
        and arguments["ground_truth"] == row.ground_truth
        and arguments.get("data_source") == row.domain
        and (arguments.get("extra_info") or {}) == (row.extra_info or {})
    ]
    if not own:
        raise Wrong(
            f"verifier '{name}' was never shown the answer of sample {sample['uid']} ({text[:80]!r}) with the ground "
            f"truth ({str(row.ground_truth)[:80]!r}), domain and extra_info of its row: the sample was judged by "
            "another's"
        )
    # One with an error may be valid: it was given a score.
    held, valid = sample["reward_parts"].get(name), bool(sample["valid"]) and sample.get("reward_errors") is None
    if valid and not any(isinstance(v, Score) and v.value == held for v in own):
        raise Wrong(
            f"sample {sample['uid']} holds {held} of verifier '{name}', which gave {_shown(own)} for its answer: "
            "verdicts sit on other samples, or a missing one was counted"
        )
    if not valid and sample.get("reward_errors") is None:
        raise Wrong(f"sample {sample['uid']} counts as without a verdict, and nothing says why")
    if name in recorded.parts.judged_in_groups:
        return None  # alone it may say something else than beside the others
    again = _ask(recorded, sample, name)
    if not valid or not isinstance(again, Score) or again.value == held:
        return None
    return f"it holds {held}, and asked again {_shown([again])}"


def _judge_differences(recorded: RecordedStep, differing: Sequence[tuple[Sample, str, str]], asked: int) -> None:
    """The sample holds what the verifier said, which now says something else. Where many differ, and the verifier says
    the same of each as often as it is asked, verdicts were handed to other samples before they were recorded; else it
    contradicts itself, and is left out from here on."""
    for name in sorted({name for _, name, _ in differing}):
        of_this = [(sample, what) for sample, other, what in differing if other == name]
        sample, what = of_this[0]
        if len(of_this) >= max(3, asked / 4) and _are_swapped(recorded, name, [s for s, _ in of_this]):
            raise Wrong(
                f"sample {sample['uid']}: {what} by verifier '{name}', and so do {len(of_this) - 1} more samples: each "
                "has what the verifier says of another. Verdicts were handed to other samples"
            )
        recorded.state.setdefault("not_deterministic", []).append(name)
        recorded.say(
            f"verifier '{name}' is not deterministic: of sample {sample['uid']} {what}. Its verdicts cannot be proven, "
            "and are left out of the audit from here on"
        )


def _are_swapped(recorded: RecordedStep, name: str, samples: Sequence[Sample]) -> bool:
    """Whether the verifier says the same of each sample as often as it is asked, within the time that asking may take,
    and what the samples hold is what it says of others."""
    began, few = time.monotonic(), samples[:MOST_TWICE]
    budget_s = max(recorded.budget_s, _DECIDES_WITHIN_S)
    said = [_shown([_ask(recorded, sample, name)]) for sample in few]
    for _ in range(TRIES - 1):
        if time.monotonic() - began > budget_s or said != [_shown([_ask(recorded, s, name)]) for s in few]:
            return False
    differ = {sample["uid"] for sample in samples}
    others = [sample for sample in recorded.proved(MOST) if sample["uid"] not in differ]
    known = {*said, *(str(sample["reward_parts"].get(name)) for sample in others)}
    return all(str(sample["reward_parts"].get(name)) in known for sample in few)


def _text(recorded: RecordedStep, sample: Sample) -> str:
    return str(recorded.parts.tokenizer.decode(sample["response_ids"].tolist(), skip_special_tokens=True))


def _ask(recorded: RecordedStep, sample: Sample, name: str) -> RewardResult:
    """By plain arguments of the row, one at a time."""
    assert recorded.parts.reward_fn is not None
    row = recorded.parts.rows[recorded.records[int(sample["group_index"])].prompt_group.row]
    return recorded.parts.reward_fn(
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
        str(reward_result.value) if isinstance(reward_result, Score) else f"no verdict ({reward_result})"
        for reward_result in reward_results
    )


CHECK = Check(
    "reward_results",
    "each verifier was shown the sample's own text and ground truth, its verdict sits on the sample, and comes out "
    "again",
    "verifiers of reward.functions that answer the same when asked again; of those that judge a group at a time only "
    "what they were shown",
    f"equal, {MOST} samples, as far as the time allows",
    prove,
)
