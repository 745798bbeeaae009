"""Checks: a sample's scores are its own, and its reward functions give them again; the score is their weighted sum, on
the sample's last token; the reward is the score minus the KL, by the coefficient of the config or the controller."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.normalization_filters_and_weights import ALL_EQUAL, MEAN_TOO_HIGH, MEAN_TOO_LOW
from distflow.audit.normalization import finished_rewards, whitened
from distflow.audit.record_calls_and_updates import GroupRecord
from distflow.audit.recorded_step import NOT_APPLICABLE, RecordedStep, Sample, Wrong, check, check_close, doubles
from distflow.audit.samples import ROUNDING, does_not_apply, filtered_values, functions_of, in_baselines
from distflow.config.derived_settings import algorithm_of, algorithms, response_limit
from distflow.config.keys.algorithm import AlgorithmConfig, is_on
from distflow.config.keys.reward import on_error_of, scoring_models
from distflow.rewards.foreign_signatures import DOES_NOT_APPLY
from distflow.rewards.load_functions import FAILS, PROMPT, call_arguments
from distflow.rewards.score import RewardResult, Score
from distflow.rewards.self_check import ECHO, echo

LIMIT = 1e-4
MOST, FEW = 16, 2
TRIES, MOST_TWICE = 6, 4
_DECIDES_WITHIN_S = 5.0
"""Minimum time to find the cause of a difference, so that a busy machine is not taken for a nondeterministic
function."""


@check(
    "reward_results",
    "each reward function was called with the sample's own text and ground truth; its score is the sample's, and is "
    "equal in a second call; the accuracy is that of one of the scores",
    needs="deterministic functions of reward.functions; for batched functions only the arguments are checked",
    limit=f"equal, {MOST} samples, as far as time allows",
)
def audit_reward_functions(recorded: RecordedStep) -> str | None:
    if recorded.run.resources.reward_fn is None:
        return NOT_APPLICABLE
    if not recorded.is_ours("reward_parts"):
        return "no built-in node or workflow decides the scores"
    if recorded.budget_s:
        _check_calls(recorded)
    seen, differing = 0, list[tuple[Sample, str, str]]()
    drawn = recorded.some_samples(MOST)
    if not recorded.is_ours("responses"):  # an episode that fails may never have asked for a score
        drawn = [sample for sample in drawn if sample["valid"] and sample["reward_errors"] is None]
    for sample in drawn:
        if (record := recorded.record_of(sample)) is not None:
            for name in functions_of(recorded, sample):
                _own_score(recorded, record, sample, name)
            _own_accuracy(recorded, record, sample)
    drawn.sort(key=lambda sample: (not sample["valid"], float(sample["token_level_scores"].sum())))
    began = time.monotonic()  # so that a busy machine has time for one call
    for sample in drawn[: FEW if recorded.partial else MOST]:  # the lowest: a failure may be one
        record = recorded.record_of(sample)
        budget_s = max(recorded.budget_s, _DECIDES_WITHIN_S) if differing else recorded.budget_s
        if record is None or time.monotonic() - began >= budget_s:
            continue
        for name in functions_of(recorded, sample):
            if name not in recorded.run.state.get("not_deterministic", []):
                what = _compare(recorded, record, sample, name)
                differing += [(sample, name, what)] if what is not None else []
                seen += 1
    if recorded.partial:  # one sample cannot say why
        recorded.run.doubts.extend(what for _, _, what in differing)
    else:
        _explain_differences(recorded, differing, seen)
    return None if seen else "no reward function could be called again in time, or none is deterministic"


@check(
    "dropped",
    "a group that the filter dropped has equal values on all its samples, or a mean outside `mean_range`, by scores "
    "of a second call",
    needs="a group that was dropped since the last audit, not by a user's function",
    limit="equal, one group",
)
def audit_dropped(recorded: RecordedStep) -> str | None:
    if recorded.dropped is None:
        return NOT_APPLICABLE
    record, reason, batch = recorded.dropped
    settings = recorded.config.algorithm.filter_groups
    if reason not in (ALL_EQUAL, MEAN_TOO_LOW, MEAN_TOO_HIGH):
        return NOT_APPLICABLE
    part = replace(recorded, records={record.prompt_group.group_id: record}, batch=batch)
    scored = [sample for sample in part.samples if sample["valid"] and sample.get("reward_errors") is None]
    values, (low, high) = filtered_values(settings.metric, part.samples), settings.mean_range or (-math.inf, math.inf)
    mean, number = math.fsum(values) / max(len(values), 1), record.prompt_group.group_id
    if reason == ALL_EQUAL and max(values, default=0.0) - min(values, default=0.0) > ROUNDING:
        what = f"for one {settings.metric} on all its samples, but has {sorted(set(values))}"
        raise Wrong(f"group {number} was dropped {what}")
    if (reason == MEAN_TOO_LOW and mean > low + ROUNDING) or (reason == MEAN_TOO_HIGH and mean < high - ROUNDING):
        raise Wrong(f"group {number} was dropped as {reason}, but the mean of its {settings.metric} is {mean:g}")
    for name in functions_of(part, scored[0]) if scored and recorded.is_ours("reward_parts") else ():
        if name not in recorded.run.state.get("not_deterministic", []):
            recorded.run.doubts.extend(filter(None, [_compare(part, record, scored[0], name)]))
    return None


def _check_calls(recorded: RecordedStep) -> None:
    """A function that fails gives no score; one that returns a number made of its arguments gives that of a sample's,
    so that nothing cuts, swaps, rounds or caches on the way to a reward function and back."""
    failed = recorded.run.call_reward(FAILS, call_arguments("", "", "", {}))
    if isinstance(failed, Score):
        raise Wrong(f"a reward function that raises must give no score, but it gave {failed.value}")
    known = [(sample, record) for sample in recorded.some_samples(1) if (record := recorded.record_of(sample))]
    for sample, record in known:
        row, text = recorded.run.spec.rows[record.prompt_group.row], str(sample["responses"])
        first, last = f" {text}{ECHO}", f"{text[::-1]}\n"
        texts = (first + last, first + "x" + last, (first + last)[::-1].replace(ECHO[::-1], ECHO))
        for said in texts[:1] if recorded.partial else texts:
            own = (said, row.ground_truth, row.extra_info or {})
            result = recorded.run.call_reward(FAILS, call_arguments(row.domain, *own))
            if isinstance(result, Score) and result.value != echo(*own):
                what = f"a number made of the arguments of sample {sample['uid']} came back as {result.value!r}"
                raise Wrong(f"{what}, not {echo(*own)!r}: reward functions get other arguments, or give other scores")


def _own_score(recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str) -> float | None:
    """The sample's score, None if it has an error; raises Wrong if the sample was scored by another text, or holds
    another sample's score."""
    wanted = _arguments(recorded, sample)
    del wanted[PROMPT]  # a user's rollout may ask something else than the row
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
            f"ground truth ({truth!r}), domain and extra_info of its row: it was scored with another's data"
        )
    # A sample with a reward error may be valid: reward.on_error can give it a score.
    score, valid = sample["reward_parts"].get(name), bool(sample["valid"]) and sample.get("reward_errors") is None
    gave = [None if DOES_NOT_APPLY in result.extra else result.value for result in own if isinstance(result, Score)]
    if valid and score not in gave:
        raise Wrong(
            f"sample {sample['uid']} has the score {score} of reward function '{name}', which gave {_shown(own)} for "
            "its response: scores are assigned to other samples, or a failed one was counted, as a 0 say"
        )
    if not valid and sample.get("reward_errors") is None:
        raise Wrong(f"sample {sample['uid']} is marked as having no score, without a reward error")
    return score if valid else None


def _own_accuracy(recorded: RecordedStep, record: GroupRecord, sample: Sample) -> None:
    """`acc`, by which groups are filtered and a sample is right, is that of one of the sample's own scores."""
    called = [(name, given, own) for name, given, own in record.scored if name in functions_of(recorded, sample)]
    if not sample["valid"] or sample.get("reward_errors") is not None or not recorded.is_ours("acc"):
        return
    text = _arguments(recorded, sample)["solution_str"]
    scores = [own for _, given, own in called if given.get("solution_str") == text and isinstance(own, Score)]
    accuracies = [acc if isinstance(acc := own.extra.get("acc"), float) else own.value for own in scores]
    if accuracies and not any(abs(float(sample["acc"]) - each) <= LIMIT for each in accuracies):
        raise Wrong(
            f"sample {sample['uid']} has the accuracy {float(sample['acc']):g}, but its reward functions gave "
            f"{', '.join(f'{each:g}' for each in accuracies)}: it belongs to another sample"
        )


def _compare(recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str) -> str | None:
    """How the sample's score differs from a new one."""
    score = _own_score(recorded, record, sample, name)
    reward_fn = recorded.run.resources.reward_fn
    if reward_fn is not None and name in reward_fn.pools.takes_groups:
        return None  # alone it may get another score than in its group
    again = recorded.run.call_reward(name, _arguments(recorded, sample))
    if score is None or not isinstance(again, Score) or again.value == score:
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
            "checked, and are left out of the audit from here on. If it scores a sandbox or service that fails, or a "
            "timeout, as 0, let it raise instead: reward errors are retried, then left out of the loss and counted"
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
    """Of a call for the sample alone, by its row and its tokens. A user's node says itself which text is scored."""
    row = recorded.run.spec.rows[recorded.records[int(sample["group_index"])].prompt_group.row]
    text = str(recorded.run.resources.tokenizer.decode(sample["response_ids"].tolist(), skip_special_tokens=True))
    text = text if recorded.is_ours("responses") else sample["responses"]
    truth, extra_info = row.ground_truth, row.extra_info or {}
    return {PROMPT: row.prompt_text, **call_arguments(row.domain, text, truth, extra_info)}


def _shown(results: Sequence[RewardResult]) -> str:
    return ", ".join(str(each.value) if isinstance(each, Score) else f"no score ({each})" for each in results)


@check(
    "rewards",
    "a sample's score is the weighted sum of its own scores and the overlong penalty, or what a workflow returned, on "
    "its last token, or split over the last tokens of its turns; its rewards are the score minus the KL penalty",
    needs="scores of the built-in reward nodes",
    limit=f"{LIMIT:g} relative",
)
def audit_rewards(recorded: RecordedStep) -> str | None:
    if not recorded.is_ours("scores"):
        return "a user's node writes the scores" if recorded.is_written("scores") else NOT_APPLICABLE
    recorded = recorded.everyone
    for sample in recorded.samples:
        if not bool(sample["valid"]):
            continue
        total = _total(recorded, sample)
        expected = _of_turns(sample)
        policy = (sample["response_mask"] > 0).nonzero()
        if len(policy):
            expected[int(policy[-1])] += total - expected.sum()
        reason = f", by its scores {dict(sample['reward_parts'])}"
        check_close(sample, "token_level_scores", expected, LIMIT, reason)
        _same_baseline(recorded, sample)
    if recorded.is_written("token_level_rewards") and not recorded.is_ours("token_level_rewards"):
        return "a user's node writes the rewards"
    why_not = [_check_processed(recorded, *each) for each in recorded.by_algorithm() if each[2]]
    return next(filter(None, why_not), None)


def _of_turns(sample: Sample) -> Tensor:
    """The rewards of an episode's turns, which only its workflow knows: nothing but the last token of a turn has one.
    0 on all tokens of other samples."""
    if "turn_index" not in sample:
        return torch.zeros(len(sample["response_ids"]), dtype=torch.float64)
    turn = sample["turn_index"]
    after = torch.cat([turn[1:], turn.new_full((1,), -1)])[: len(turn)]
    return torch.where((turn >= 0) & (turn != after), doubles(sample["token_level_scores"]), 0.0)


def _check_processed(
    recorded: RecordedStep, domain: str, algorithm: AlgorithmConfig, samples: Sequence[Sample]
) -> str | None:
    """Rewards of samples with the same settings, by their scores."""
    levels = (algorithm.reward_norm.mean_level, algorithm.reward_norm.std_level)
    moments = recorded.run.state.get("reward_moments", {}).get(domain)
    if not recorded.is_whole and ("batch" in levels or algorithm.whiten_rewards):
        return "reward_norm and whiten_rewards need all samples of the step, which are too many to send to all ranks"
    if "running" in levels and moments is None:
        return "rewards before this process, or on other ranks, were not recorded"
    samples = in_baselines(recorded, algorithm, samples)
    makes_one = is_on(algorithm.reward_norm) or algorithm.reward_clip is not None
    makes_one |= (algorithm.reward_shift, algorithm.reward_scale) != (0, 1)
    counts = [[bool(sample["valid"]) and m > 0 for m in sample["response_mask"].tolist()] for sample in samples]
    rows = []
    for sample, counted, reward in zip(samples, counts, finished_rewards(samples, algorithm, moments), strict=True):
        last = max((token for token, counts_too in enumerate(counted) if counts_too), default=-1)
        own = [reward * (token == last) for token in range(len(counted))]
        own = own if makes_one or "turn_index" not in sample else sample["token_level_scores"].tolist()
        rows.append([each - less for each, less in zip(own, _kl_penalty(recorded, sample).tolist(), strict=True)])
    if algorithm.whiten_rewards:
        rows = whitened(rows, counts)
    for sample, row in zip(samples, rows, strict=True):
        if sample["valid"]:
            reason = f", by its scores {dict(sample['reward_parts'])}"
            check_close(sample, "token_level_rewards", torch.tensor(row, dtype=torch.float64), LIMIT, reason)
    return None


def remember_rewards(recorded: RecordedStep) -> None:
    """Add the step's scores to the moments of all rewards so far, of settings that normalise by them."""
    kept = recorded.run.state.setdefault("reward_moments", {})
    for domain, algorithm in algorithms(recorded.config):
        if "running" not in (algorithm.reward_norm.mean_level, algorithm.reward_norm.std_level):
            continue
        if recorded.run.ranks.size > 1 or (domain or "") not in kept and recorded.step > 0:
            continue
        before = kept.get(domain or "", {"count": 0, "mean": 0.0, "squares": 0.0})
        (samples,) = (samples for name, _, samples in recorded.by_algorithm() if name == (domain or ""))
        counted = in_baselines(recorded, algorithm, samples)
        scores = [math.fsum(s["token_level_scores"].tolist()) for s in counted if s["valid"]]
        scores = [(score + algorithm.reward_shift) * algorithm.reward_scale for score in scores]
        total = before["count"] + len(scores)
        if not scores:
            continue
        middle = before["mean"] + math.fsum(score - before["mean"] for score in scores) / total
        added = math.fsum((score - middle) ** 2 for score in scores)
        moved = before["count"] * (before["mean"] - middle) ** 2
        kept[domain or ""] = {"count": total, "mean": middle, "squares": before["squares"] + moved + added}


@check(
    "kl_control",
    "the coefficient of the KL in the reward is the config's, or the adaptive controller's update from the last step's "
    "KL (arXiv:1909.08593)",
    needs="a pipeline with the KL in the reward, and the previous step in this process or its checkpoint",
    limit=f"{LIMIT:g} relative",
)
def audit_kl_control(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("token_level_rewards"):
        return NOT_APPLICABLE
    recorded = recorded.everyone
    using = [each for each in recorded.by_algorithm() if each[1].use_kl_in_reward]
    why_not = [_check_coefficient(recorded, *each) for each in using]
    return next(filter(None, why_not), None) if using else NOT_APPLICABLE


def _check_coefficient(
    recorded: RecordedStep, domain: str, algorithm: AlgorithmConfig, samples: Sequence[Sample]
) -> str | None:
    control, suffix = algorithm.kl_ctrl, f"/{domain}" if domain else ""
    if recorded.is_whole and recorded.is_ours("token_level_rewards"):
        _same_mean(recorded, algorithm, suffix, samples)
    found = recorded.metrics.get(f"actor/kl_coef{suffix}")
    if found is None:
        return "the pipeline does not report its coefficient"
    before = recorded.run.state.get("kl_control", {}).get(domain)
    if control.type == "fixed" or (before is None and recorded.step == 0):
        expected = control.kl_coef
    elif before is None or before["step"] != recorded.step - 1:
        return "the previous step was not recorded"
    else:
        assert control.target_kl is not None and control.horizon is not None, "the config's rules ensure it"
        error = min(max(before["kl"] / control.target_kl - 1.0, -0.2), 0.2)
        expected = max(before["coefficient"] * (1.0 + error * before["samples"] / control.horizon), 0.0)
    if not abs(found - expected) <= LIMIT * max(abs(expected), 1e-12):
        raise Wrong(f"the KL in the reward has the coefficient {found:.6g}, but should have {expected:.6g}")
    return None


def remember_coefficients(recorded: RecordedStep) -> None:
    """What the adaptive controllers of the next step start from. Called on all ranks together."""
    kept = recorded.run.state.setdefault("kl_control", {})
    for domain, algorithm in algorithms(recorded.config):
        suffix = f"/{domain}" if domain else ""
        if algorithm.kl_ctrl.type == "fixed" or f"actor/kl_coef{suffix}" not in recorded.metrics:
            continue
        own = recorded.config.algorithm.domains
        count = sum((name if name in own else None) == domain for name in recorded.batch["domain"])
        kept[domain or ""] = {
            "step": recorded.step,
            "coefficient": recorded.metrics[f"actor/kl_coef{suffix}"],
            "kl": recorded.metrics[f"actor/reward_kl_penalty{suffix}"],
            "samples": int(recorded.run.inputs.ports.collective.sum(float(count))),
        }


def kl(difference: Tensor, kind: str) -> Tensor:
    """Estimates of the KL by d = log π − log π_ref (Schulman's k1, k2, k3), `|d|`. A trailing + changes the gradient
    only, which is left to the caller."""
    match kind.removesuffix("+"):
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return difference**2 / 2
        case "low_var_kl" | "k3":
            bounded = difference.clamp(-20.0, 20.0)
            return ((-bounded).exp() + bounded - 1.0).clamp(-10.0, 10.0)
    raise ValueError(f"no formula for the KL estimate '{kind}'")


def _total(recorded: RecordedStep, sample: Sample) -> float:
    """The weighted sum of the sample's scores, or the score that reward.on_error gives in their place."""
    if sample["reward_errors"] is not None:
        fallback = on_error_of(recorded.config.reward, sample["domain"])
        if not isinstance(fallback, float):
            raise Wrong(f"sample {sample['uid']} has a score in spite of reward errors: {sample['reward_errors']}")
        return fallback
    rollout, record = recorded.config.actor_rollout_ref.rollout, recorded.record_of(sample)
    weights, parts = functions_of(recorded, sample), sample["reward_parts"]
    if rollout.workflow is not None and not recorded.is_ours("reward_parts"):
        if record is None:
            return float(sample["scores"])
        total = _returned(sample, record)
    else:
        every = dict.fromkeys(does_not_apply(sample), 0.0) | parts
        total = sum(every.get(name, math.nan) * weight for name, weight in weights.items())
        total += _overlong(recorded, sample["domain"], len(sample["response_ids"]))
    if rollout.workflow == "multi_turn":
        of_policy = torch.cat([torch.zeros(1), sample["response_mask"]]) > 0
        num_turns = len(recorded.turns(sample)) or int((of_policy[1:] & ~of_policy[:-1]).sum())
        discount: Any = rollout.workflow_kwargs.get("turn_discount", 1.0)
        total *= discount ** (num_turns - 1)
    if any("scores" in step.node.contract.writes for step in recorded.run.training_steps):  # elsewhere none is added
        models = scoring_models(recorded.config.reward_model).items()
        total += sum(parts.get(name, math.nan) * model.weight for name, model in models)
    return total


def _returned(sample: Sample, record: GroupRecord) -> float:
    """What the workflow returned for the sample's tokens: a number, parts or their `score`, or a reward's result."""
    ids, found = (*sample["prompt_ids"].tolist(), *sample["response_ids"].tolist()), list[float]()
    for returned in (returned for episode, returned in record.returned if episode == ids):
        value = getattr(getattr(returned, "reward_result", returned), "value", returned)
        parts: Any = value if isinstance(value, Mapping) else {"score": value}
        own = [parts["score"]] if "score" in parts else [parts[name] for name in parts if name != "acc"]
        with suppress(TypeError, ValueError):  # of a failed or rejected episode with the same tokens
            found.append(math.fsum(float(value) for value in own))
    return min(found, key=lambda value: abs(value - float(sample["scores"])), default=math.nan)  # NaN is never close


def _same_baseline(recorded: RecordedStep, sample: Sample) -> None:
    """ReMax's baseline is the score of the group's one greedy response, by the reward functions."""
    record = recorded.record_of(sample)
    if "reward_baselines" not in sample or record is None or not recorded.is_ours("reward_baselines"):
        return
    if algorithm_of(recorded.config, sample["domain"]).adv_estimator != "remax":
        return
    group = f"group {record.prompt_group.group_id}"
    found = [(request, result.generations[0]) for request, result in record.generated if request.params.greedy]
    if len(found) != 1:
        raise Wrong(f"{group} has {len(found)} greedy responses, but its baseline needs one")
    request, response = found[0]
    if request.params.max_tokens != response_limit(recorded.config, sample["domain"]):
        raise Wrong(f"the greedy response of {group} may have {request.params.max_tokens} tokens")
    text = str(recorded.run.resources.tokenizer.decode(list(response.token_ids), skip_special_tokens=True))
    total = _overlong(recorded, sample["domain"], len(response.token_ids))
    for name, weight in functions_of(recorded, sample).items():
        results = [r for called, arguments, r in record.scored if called == name and arguments["solution_str"] == text]
        if not results or not isinstance(results[-1], Score):
            raise Wrong(f"the greedy response of {group} has no score of '{name}' for its baseline")
        total += weight * results[-1].value
    if not abs(float(sample["reward_baselines"]) - total) <= LIMIT * max(abs(total), 1.0):
        raise Wrong(
            f"the baseline of sample {sample['uid']} is {float(sample['reward_baselines']):g}, its greedy response's "
            f"score {total:g}"
        )


def _overlong(recorded: RecordedStep, domain: str, length: int) -> float:
    """0 until the zone before the limit, falling to −factor at the limit (DAPO, arXiv:2503.14476)."""
    zone = recorded.config.reward.overlong
    if zone.buffer_tokens <= 0:
        return 0.0
    inside = length - (response_limit(recorded.config, domain) - zone.buffer_tokens)
    return -zone.factor * min(max(inside / zone.buffer_tokens, 0.0), 1.0)


def _kl_penalty(recorded: RecordedStep, sample: Sample) -> Tensor:
    domain = sample["domain"]
    algorithm, is_own = algorithm_of(recorded.config, domain), domain in recorded.config.algorithm.domains
    if not algorithm.use_kl_in_reward:
        return torch.zeros(len(sample["response_mask"]), dtype=torch.float64)
    coefficient = recorded.metrics.get(f"actor/kl_coef/{domain}" if is_own else "actor/kl_coef", 0.0)
    if algorithm.kl_ctrl.type == "fixed":
        coefficient = algorithm.kl_ctrl.kl_coef
    difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
    penalty = coefficient * kl(difference, algorithm.kl_penalty)
    return torch.where(sample["response_mask"] > 0, penalty, 0.0)


def _same_mean(recorded: RecordedStep, algorithm: AlgorithmConfig, suffix: str, samples: Sequence[Sample]) -> None:
    """The controller's input is the mean KL over the tokens of valid samples, or the mean of samples' means."""
    of_samples = list[Tensor]()
    for sample in in_baselines(recorded, algorithm, samples):
        counted = (sample["response_mask"] > 0) & bool(sample["valid"])
        difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
        of_samples.append(kl(difference, algorithm.kl_penalty)[counted])
    if algorithm.kl_ctrl.mean == "sequence":
        expected = float(torch.stack([values.sum() / max(len(values), 1) for values in of_samples]).mean())
    else:
        tokens = torch.cat(of_samples)
        expected = float(tokens.sum() / max(len(tokens), 1))
    found = recorded.metrics.get(f"actor/reward_kl_penalty{suffix}")
    if found is not None and not abs(found - expected) <= 1e-3 * abs(expected) + 1e-6:
        raise Wrong(f"the controller was given a KL of {found:.6g}, but the KL of the step's tokens is {expected:.6g}")
