"""Checks: a sample's scores are its own, and its reward functions reproduce them, or a judge's
store has them; a dropped group had to be dropped."""

import hashlib
import json
import math
import random
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

from distflow.algorithms.normalization_filters_and_weights import (
    ALL_EQUAL,
    MEAN_TOO_HIGH,
    MEAN_TOO_LOW,
    TOO_FEW_SCORES,
    TOO_LARGE,
)
from distflow.audit.audited_step.groups_responses_and_masks import (
    accuracies,
    filtered_values,
    functions_of,
    parts_of_domain,
    rounding_of_mean,
)
from distflow.audit.check import NOT_APPLICABLE, Sample, Wrong, check
from distflow.audit.record_groups_and_updates import GroupRecord
from distflow.audit.recorded_step import RecordedStep
from distflow.builtin_names import ESTIMATORS
from distflow.config.derived_settings import algorithm_of
from distflow.config.keys.reward import on_error_of, scoring_models
from distflow.data.batch import Batch
from distflow.data.messages import prompt_of
from distflow.rewards.foreign_signatures import DOES_NOT_APPLY
from distflow.rewards.load_and_call_reward_functions import (
    CONVERSATION,
    FAILS,
    PROMPT,
    call_arguments,
)
from distflow.rewards.pool.faulty_test_functions import ECHO, echo
from distflow.rewards.reward_results import RewardResult, Score

LIMIT = 1e-4
LEAST_GAP = 1e-9
MOST = 16
FEW = 2
MOST_RANKED = 4
RANKED = ("grpo", "gspo", "cpgd", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
"""Estimators with which a better score is a larger advantage than that of another sample of the
group."""
TRIES = 6
MOST_TWICE = 4
_DECIDES_WITHIN_S = 5.0
"""Minimum time to find the cause of a difference, lest a busy machine look like a nondeterministic
function."""


@check(
    "reward_results",
    "each reward function was called with the sample's own text and ground truth; the sample has "
    "its score, and a "
    "second call returns the same score; `math`, `exact_match` and `format` judge plain answers, "
    "and `length` and "
    "`repetition` with their options any response, as a second reading of them does; the accuracy "
    "is that of the "
    "function that decides it",
    needs=(
        "deterministic functions of reward.functions; for batched functions only the arguments are "
        "checked"
    ),
    limit=f"equal, {MOST} samples, as far as time allows",
)
def audit_reward_functions(recorded: RecordedStep) -> str | None:
    if recorded.run.resources.reward_fn is None:
        return NOT_APPLICABLE
    if not recorded.is_ours("reward_parts"):
        return "no built-in node or workflow decides the scores"
    if recorded.budget_s:
        _check_calls(recorded)
    seen = 0
    differing = list[tuple[Sample, str, str]]()
    drawn = recorded.some_samples(MOST)
    if not recorded.is_ours("responses"):  # a failed episode may never have requested a score
        drawn = [sample for sample in drawn if sample["valid"] and sample["reward_errors"] is None]
    for sample in drawn:
        if (record := recorded.record_of(sample)) is not None:
            for name in functions_of(recorded, sample):
                _own_score(recorded, record, sample, name)
            _own_accuracy(recorded, record, sample)
    _plain_scores(recorded)
    drawn.sort(key=lambda sample: (not sample["valid"], float(sample["token_level_scores"].sum())))
    began = time.monotonic()  # so that even a busy machine has time for one call
    # use the lowest: a failure may be an outlier
    for sample in drawn[: FEW if recorded.partial else MOST]:
        record = recorded.record_of(sample)
        budget_s = max(recorded.budget_s, _DECIDES_WITHIN_S) if differing else recorded.budget_s
        if record is None or time.monotonic() - began >= budget_s:
            continue
        for name in functions_of(recorded, sample):
            if name not in recorded.run.state.get("not_deterministic", []):
                what = _compare(recorded, record, sample, name)
                differing += [(sample, name, what)] if what is not None else []
                seen += 1
    if recorded.partial:  # one sample cannot show the cause
        recorded.run.doubts.extend(what for _, _, what in differing)
    else:
        _explain_differences(recorded, differing, seen)
    return (
        None
        if seen
        else "no reward function could be called again in time, or none is deterministic"
    )


@check(
    "dropped",
    "dropped groups have equal values on all their samples, or a mean outside `mean_range`; in "
    "audited steps a second "
    "call of the reward functions confirms it for one",
    needs="groups dropped since the last step, but not by a custom function",
    limit="equal, the last few groups of a step",
)
def audit_dropped(recorded: RecordedStep) -> str | None:
    return check_dropped(recorded, calls=True)


def check_dropped(recorded: RecordedStep, calls: bool) -> str | None:
    """calls: whether to call reward functions."""
    last = recorded.dropped[-1] if recorded.dropped and calls else None
    found = [_check_dropped(recorded, *each, again=each is last) for each in recorded.dropped]
    return found[-1] if found else NOT_APPLICABLE


def _check_dropped(
    recorded: RecordedStep, record: GroupRecord, reason: str, batch: Batch, again: bool
) -> str | None:
    settings = recorded.config.algorithm.filter_groups
    if reason == TOO_FEW_SCORES:
        return _check_too_few(recorded, record, batch)
    if reason not in (ALL_EQUAL, TOO_LARGE, MEAN_TOO_LOW, MEAN_TOO_HIGH):
        return NOT_APPLICABLE
    part = replace(recorded, records={record.prompt_group.group_id: record}, batch=batch)
    scored = [
        sample for sample in part.samples if sample["valid"] and sample.get("reward_errors") is None
    ]
    values, (low, high) = (
        filtered_values(settings.metric, part.samples),
        settings.mean_range or (-math.inf, math.inf),
    )
    mean = math.fsum(values) / max(len(values), 1)
    number = record.prompt_group.group_id
    is_equal = max(values, default=0.0) == min(values, default=0.0)
    if reason in (ALL_EQUAL, TOO_LARGE) and not is_equal:
        what = f"for one {settings.metric} on all its samples, but has {sorted(set(values))}"
        raise Wrong(f"group {number} was dropped {what}")
    near = rounding_of_mean(recorded)
    if (reason == MEAN_TOO_LOW and mean > low + near) or (
        reason == MEAN_TOO_HIGH and mean < high - near
    ):
        raise Wrong(
            f"group {number} was dropped as {reason}, but the mean of its {settings.metric} is "
            f"{mean:g}"
        )
    for name in (
        functions_of(part, scored[0])
        if again and scored and recorded.is_ours("reward_parts")
        else ()
    ):
        if name not in recorded.run.state.get("not_deterministic", []):
            recorded.run.doubts.extend(filter(None, [_compare(part, record, scored[0], name)]))
    return None


def _check_too_few(recorded: RecordedStep, record: GroupRecord, batch: Batch) -> str | None:
    """The group had fewer scored samples than its estimator compares. Its columns lack the
    scores."""
    part = replace(recorded, records={record.prompt_group.group_id: record}, batch=batch)
    names = functions_of(part, part.samples[0])
    domain = part.samples[0]["domain"]
    estimator = ESTIMATORS.get(algorithm_of(recorded.config, domain).adv_estimator)
    if (
        on_error_of(recorded.config.reward, domain) == "drop"
        or "reward_baselines" in batch
        or estimator is None
    ):
        return NOT_APPLICABLE
    known = {
        (name, given.get("solution_str"))
        for name, given, own in record.scored
        if isinstance(own, Score)
    }
    scored = [
        each for each in part.samples if all((name, each["responses"]) in known for name in names)
    ]
    if len(scored) >= (2 if estimator.needs_group else 1):
        number = record.prompt_group.group_id
        raise Wrong(
            f"group {number} was dropped for too few scores, but {len(scored)} of its samples have "
            "one"
        )
    return None


def _check_calls(recorded: RecordedStep) -> None:
    """Test calls: a failing function gives no score, and one that computes a number from its
    arguments gives the sample's, so nothing is cut, swapped, rounded or cached on the way to a
    reward function and back."""
    failed = recorded.run.call_reward(FAILS, call_arguments("", "", "", {}))
    if isinstance(failed, Score):
        raise Wrong(f"a reward function that raises must give no score, but it gave {failed.value}")
    known = [
        (sample, record)
        for sample in recorded.some_samples(1)
        if (record := recorded.record_of(sample))
    ]
    for sample, record in known:
        row = recorded.run.row(record.prompt_group.row)
        text = str(sample["responses"])
        first = f" {text}{ECHO}"
        last = f"{text[::-1]}\n"
        texts = (first + last, first + "x" + last, (first + last)[::-1].replace(ECHO[::-1], ECHO))
        for said in texts[:1] if recorded.partial else texts:
            own = (said, row.ground_truth, row.extra_info or {})
            result = recorded.run.call_reward(FAILS, call_arguments(row.domain, *own))
            if isinstance(result, Score) and result.value != echo(*own):
                what = (
                    f"a number made of the arguments of sample {sample['uid']} came back as "
                    f"{result.value!r}"
                )
                raise Wrong(
                    f"{what}, not {echo(*own)!r}: reward functions get other arguments, or give "
                    "other scores"
                )


def audit_ranks(recorded: RecordedStep) -> str | None:
    """In one drawn group a better score, as the reward functions gave it for the sample's text, is
    a larger advantage. Reads so little that every step has it."""
    if not _ranks(recorded):
        return NOT_APPLICABLE
    batch = recorded.batch
    lengths = batch.lengths("response")
    of_group = batch["group_index"]
    drawn = random.Random(recorded.step)
    starts = lengths.cumsum(0) - lengths
    groups = of_group.unique().tolist()
    for group in drawn.sample(groups, min(MOST_RANKED, len(groups))):
        scores = _given_scores(
            recorded, group, ((of_group == group) & (lengths > 0)).nonzero()[:, 0].tolist()
        )
        if len({*scores.values()}) < 2:
            continue
        first = starts[[*scores]]
        advantages, counts = (
            batch.flat(name)[first].tolist() for name in ("advantages", "loss_mask")
        )
        every = zip(scores.values(), advantages, scores, counts, strict=True)
        for (low, less, *_), (high, more, row, _) in pairwise(
            sorted(each for each in every if each[-1] > 0)
        ):
            if high - low > LEAST_GAP * max(abs(high), 1.0) and not less < more:
                raise Wrong(
                    f"sample {batch['uid'][row]} has the score {high:g} by its reward functions "
                    "and the advantage "
                    f"{more:g}, but another of its group the lower score {low:g} and the advantage "
                    f"{less:g}: scores or "
                    "advantages are assigned to other samples, or their sign is flipped"
                )
        break
    return None


def _ranks(recorded: RecordedStep) -> bool:
    """Whether a better score is a larger advantage within a group, by the config."""
    config = recorded.config
    settings = recorded.config.algorithm
    changed = settings.use_kl_in_reward or settings.whiten_rewards or settings.reward_scale <= 0
    changed |= any(each is not None for each in (settings.reward_clip, settings.advantage_clip))
    changed |= any(
        each is not None for each in (settings.difficulty_weight, settings.length_weight)
    )
    changed |= bool(
        settings.domains
        or config.reward.overlong.buffer_tokens
        or scoring_models(config.reward_model)
    )
    changed |= (
        config.actor_rollout_ref.rollout.workflow is not None or "advantages" not in recorded.batch
    )
    names = ("advantages", "scores", "responses", "reward_parts")
    rewards = filter(recorded.is_written, ("token_level_scores", "token_level_rewards"))
    changed |= not all(map(recorded.is_ours, rewards))
    return settings.adv_estimator in RANKED and not changed and all(map(recorded.is_ours, names))


def _given_scores(recorded: RecordedStep, group: int, rows: Sequence[int]) -> dict[int, float]:
    """By row, the weighted sum of the scores that were given for its text; only of samples with a
    score of each function."""
    record = recorded.records.get(group)
    batch = recorded.batch
    found = dict[int, float]()
    if record is None or not rows:
        return found
    weights = {
        part.name: part.weight
        for part in parts_of_domain(recorded.config, batch["domain"][rows[0]])
    }
    given = dict[tuple[str, object], set[float]]()
    for name, arguments, own in record.scored:
        if isinstance(own, Score) and DOES_NOT_APPLY not in own.extra:
            given.setdefault((name, arguments.get("solution_str")), set()).add(own.value)
    texts = batch["responses"]
    errors = batch["reward_errors"]
    valid = batch["valid"].tolist()
    for row in rows:
        each = [given.get((name, texts[row]), set()) for name in weights]
        if errors[row] is None and valid[row] and all(len(own) == 1 for own in each):
            found[row] = sum(
                weight * min(own) for weight, own in zip(weights.values(), each, strict=True)
            )
    return found


def _own_score(
    recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str
) -> float | None:
    """The sample's score, None for an error. Raises Wrong if the scored text or the score is
    another sample's."""
    wanted = _arguments(recorded, sample, name)
    del wanted[PROMPT]  # a user's rollout may use a prompt other than the row's
    own = [
        result
        for called, given, result in record.scored
        if called == name
        and given.get("solution_str") == wanted["solution_str"]
        and {**{key: given.get(key) for key in wanted}, "extra_info": given.get("extra_info") or {}}
        == wanted
    ]
    if not own:
        text = wanted["solution_str"][:80]
        truth = str(wanted["ground_truth"])[:80]
        raise Wrong(
            f"reward function '{name}' was never called with the response of sample "
            f"{sample['uid']} ({text!r}) and the "
            f"ground truth ({truth!r}), domain and extra_info of its row: it was scored with "
            "another's data"
        )
    # A sample with a reward error may be valid: reward.on_error can assign a score.
    score = sample["reward_parts"].get(name)
    valid = bool(sample["valid"]) and sample.get("reward_errors") is None
    gave = [
        None if DOES_NOT_APPLY in result.extra else result.value
        for result in own
        if isinstance(result, Score)
    ]
    if valid and score not in gave:
        raise Wrong(
            f"sample {sample['uid']} has the score {score} of reward function '{name}', which gave "
            f"{_shown(own)} for "
            "its response: scores are assigned to other samples, or a failed one was counted, as a "
            "0 say"
        )
    if not valid and sample.get("reward_errors") is None:
        raise Wrong(f"sample {sample['uid']} is marked as having no score, without a reward error")
    return score if valid else None


_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?", re.ASCII)


def _plain_scores(recorded: RecordedStep) -> None:
    """Check the scores of the built-ins that compare plain answers, of all samples, by a reading of
    our own."""
    for sample in recorded.samples:
        record = recorded.record_of(sample)
        if record is None or not sample["valid"] or sample.get("reward_errors") is not None:
            continue
        row = recorded.run.row(record.prompt_group.row)
        text = str(sample["responses"])
        for part in parts_of_domain(recorded.config, sample["domain"]):
            found = sample["reward_parts"].get(part.name)
            wanted = counted_score(part.name, text, part.options)
            if wanted is None and not part.options:
                wanted = plain_score(part.name, text, row.ground_truth, row.extra_info or {})
            if wanted is not None and found is not None and abs(found - wanted) > LIMIT:
                raise Wrong(
                    f"reward function '{part.name}' gave {found:g} to sample {sample['uid']}, "
                    "whose response ends with "
                    f"{text[-40:]!r}, for the ground truth {row.ground_truth!r:.40}: it should "
                    f"give {wanted:g}. The "
                    "function judges wrongly here: reinstall distflow, or undo a change of "
                    "distflow/rewards"
                )


def counted_score(name: str, text: str, options: Mapping[str, Any]) -> float | None:
    """The score of `length` or `repetition` with its options; None for another function."""
    words = text.lower().split()
    default = {"length": "characters", "repetition": "words"}.get(name)
    in_words = options.get("unit", default) == "words"
    if name == "length":
        number = len(words) if in_words else len(text)
        slope = options.get("slope", 0)
        missed_by = max(
            options.get("at_least", 1) - number, number - options.get("at_most", math.inf), 0
        )
        return max(0.0, 1.0 - missed_by / slope) if slope else float(not missed_by)
    if name == "repetition":
        parts = words if in_words else [*"".join(words)]
        n = options.get("n", 3)
        grams = [tuple(parts[start : start + n]) for start in range(len(parts) - n + 1)]
        return 1.0 - len({*grams}) / len(grams) if grams else 0.0
    return None


def plain_score(
    name: str, text: str, truth: object, extra_info: Mapping[str, object]
) -> float | None:
    """The score of a built-in without options for a response, if that is plain to see; else
    None."""
    if name == "format":
        pattern = extra_info.get("format_regex")
        if isinstance(pattern, str):
            return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
        return 0.0 if "boxed" not in text and "fbox" not in text else None
    is_plain = isinstance(truth, int | str) and not isinstance(truth, bool)
    if name not in ("math", "exact_match") or not is_plain:
        return None
    (marked, said), (_, gold) = _stated(text), _stated(str(truth))
    if said is None or gold is None:
        return None
    if name == "exact_match":
        return float(said.split() == gold.split())
    if not (marked and _NUMBER.fullmatch(said) and _NUMBER.fullmatch(gold)):
        return None
    # one may be the other, rounded
    rounds = len(said.partition(".")[2]) != len(gold.partition(".")[2])
    is_equal = Decimal(said) == Decimal(gold)
    return 1.0 if is_equal else None if rounds else 0.0


def _stated(text: str) -> tuple[bool, str | None]:
    """Whether an answer is marked, and the answer: of the only box, behind the last `####`, else
    the whole text. None if several boxes, or one with braces in it, leave it open."""
    if "boxed" in text or "fbox" in text:
        before, _, behind = text.partition("\\boxed{")
        inside, brace, after = behind.partition("}")
        is_open = (
            not brace
            or "{" in inside
            or "\\" in inside
            or any(each in before + after for each in ("boxed", "fbox"))
        )
        return True, None if is_open else inside.strip()
    place = text.rfind("####")
    return place >= 0, (text[place + 4 :].strip().split("\n")[0] if place >= 0 else text).strip()


def _own_accuracy(recorded: RecordedStep, record: GroupRecord, sample: Sample) -> None:
    """Check that `acc`, by which groups are filtered and samples count as right, is from the
    function that decides."""
    if (
        not sample["valid"]
        or sample.get("reward_errors") is not None
        or not recorded.is_ours("acc")
    ):
        return
    text = _arguments(recorded, sample)["solution_str"]
    given = [(name, own) for name, call, own in record.scored if call.get("solution_str") == text]
    stated = accuracies(parts_of_domain(recorded.config, sample["domain"]), given)
    if stated and not any(
        abs(float(sample["acc"]) - each) <= LIMIT * max(abs(each), 1.0) for each in stated
    ):
        raise Wrong(
            f"sample {sample['uid']} has the accuracy {float(sample['acc']):g}, but the reward "
            "function that decides "
            f"it gave {', '.join(f'{each:g}' for each in stated)}: it was taken from another "
            "sample or function, or "
            "changed on the way into the batch"
        )


def _compare(recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str) -> str | None:
    """Text on how the sample's score differs from a new one, or None."""
    score = _own_score(recorded, record, sample, name)
    reward_fn = recorded.run.resources.reward_fn
    if reward_fn is not None and name in reward_fn.pools.takes_groups:
        return None  # scored alone, it may get another score than in its group
    again = recorded.run.call_reward(name, _arguments(recorded, sample, name))
    if score is None or not isinstance(again, Score) or again.value == score:
        return None
    return f"the score was {score}, and is {_shown([again])} in a second call"


def _explain_differences(
    recorded: RecordedStep, differing: Sequence[tuple[Sample, str, str]], num_called: int
) -> None:
    """Explain recorded scores that the reward function does not reproduce. If many differ, and the
    function is consistent over repeated calls, scores were assigned to wrong samples before
    recording; else the function is not deterministic, and is not checked any more."""
    for name in sorted({name for _, name, _ in differing}):
        of_this = [(sample, what) for sample, other, what in differing if other == name]
        sample, what = of_this[0]
        if len(of_this) >= max(3, num_called / 4) and _are_swapped(
            recorded, name, [s for s, _ in of_this]
        ):
            raise Wrong(
                f"sample {sample['uid']}: {what} by reward function '{name}', and "
                f"{len(of_this) - 1} more samples "
                "differ: each has the score of another. Scores were given to other samples"
            )
        recorded.run.state.setdefault("not_deterministic", []).append(name)
        recorded.run.warn(
            f"reward function '{name}' is not deterministic: for sample {sample['uid']} {what}. "
            "Its scores cannot be "
            "checked, and are left out of the audit from here on. If it scores a sandbox or "
            "service that fails, or a "
            "timeout, as 0, let it raise instead: reward errors are retried, then left out of the "
            "loss and counted"
        )


def _are_swapped(recorded: RecordedStep, name: str, samples: Sequence[Sample]) -> bool:
    """Whether the reward function is consistent over repeated calls, within the time budget, and
    the samples have its scores for other samples."""
    began = time.monotonic()
    few = samples[:MOST_TWICE]
    calls = [_arguments(recorded, sample, name) for sample in few]
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


def _arguments(recorded: RecordedStep, sample: Sample, name: str = "") -> dict[str, Any]:
    """Arguments of a call for the sample alone, from its row and tokens. A user's node decides
    which text is scored. name: of the function."""
    row = recorded.run.row(recorded.records[int(sample["group_index"])].prompt_group.row)
    ours = recorded.is_ours("responses")
    text = recorded.run.text((*sample["response_ids"].tolist(),)) if ours else sample["responses"]
    truth = row.ground_truth
    extra_info = row.extra_info or {}
    reward_fn = recorded.run.resources.reward_fn
    said = sample.get("conversation")
    own = {
        PROMPT: prompt_of(row.prompt_text, extra_info),
        **call_arguments(row.domain, text, truth, extra_info),
    }
    if said and reward_fn is not None and name in reward_fn.pools.takes_conversations:
        own[CONVERSATION] = list(said)
    return own


def _shown(results: Sequence[RewardResult]) -> str:
    return ", ".join(
        str(each.value) if isinstance(each, Score) else f"no score ({each})" for each in results
    )


@check(
    "judge_answers",
    "the judge's store contains a reply of the judge's model and endpoint on the sample's own "
    "response and ground "
    "truth, and the sample has this reply's score",
    needs="a judge with the option store, of reward.functions",
    limit=f"equal, {MOST} samples",
)
def audit_judge_answers(recorded: RecordedStep) -> str | None:
    judges = {
        (domain, part.name): part.options
        for domain in {str(sample["domain"]) for sample in recorded.samples}
        for part in parts_of_domain(recorded.config, domain)
        if part.name == "judge" and part.options.get("store")
    }
    if not judges or not recorded.is_ours("reward_parts"):
        return NOT_APPLICABLE
    seen = 0
    for sample in recorded.some_samples(MOST):
        options = judges.get((sample["domain"], "judge"))
        record = recorded.record_of(sample)
        if (
            options is None
            or record is None
            or sample["reward_errors"] is not None
            or not sample["valid"]
        ):
            continue
        truth = recorded.run.row(record.prompt_group.row).ground_truth
        asked = [options.get("base_url", ""), options.get("model", ""), sample["responses"], truth]
        about = hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()
        with closing(
            sqlite3.connect(Path(str(options["store"])).expanduser(), timeout=1.0)
        ) as connection:
            answers = connection.execute(
                "SELECT content FROM answers WHERE about = ?", (about,)
            ).fetchall()
        scores = [json.loads(content)["score"] for (content,) in answers]
        score = sample["reward_parts"]["judge"]
        seen += 1
        if not any(abs(score - each) <= LIMIT for each in scores):
            raise Wrong(
                f"sample {sample['uid']} has the judge's score {score:g}, but of its response the "
                "store "
                f"{options['store']} has {scores or 'no answer'}: an answer about another response "
                "was found, or one "
                "was changed"
            )
    return None if seen else "no sample of this process has a judge's score"
