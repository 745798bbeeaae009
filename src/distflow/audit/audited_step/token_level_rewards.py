"""Checks: the score is the weighted sum of a sample's scores, on the tokens where it was earned;
the reward is the score minus the KL, times the coefficient of the config or the controller."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from distflow.audit.audited_step.episodes import rewards_of_turns
from distflow.audit.audited_step.groups_responses_and_masks import (
    does_not_apply,
    functions_of,
    in_baselines,
    parts_of_domain,
)
from distflow.audit.audited_step.normalization_formulas import finished_rewards, whitened
from distflow.audit.audited_step.rescored_samples import LIMIT
from distflow.audit.check import NOT_APPLICABLE, Sample, Wrong, check, check_close, doubles
from distflow.audit.record_groups_and_updates import GroupRecord
from distflow.audit.recorded_step import RecordedStep, conversations_of, index_of
from distflow.config.derived_settings import algorithm_of, algorithms, response_limit
from distflow.config.keys.algorithm import AlgorithmConfig, is_on
from distflow.config.keys.reward import on_error_of, scoring_models
from distflow.rewards.reward_results import Score

EXACT = 1e-9
"""Relative: scores are float64, also those that hardly differ. Sums of rewards after a
normalisation have `LIMIT`."""


@check(
    "rewards",
    "a sample's score is the weighted sum of its own scores and the overlong penalty, or the "
    "workflow's result, on "
    "its last token; each turn's own reward is on that turn's last token; token rewards are scores "
    "minus KL penalty",
    needs="scores of the built-in reward nodes",
    limit=f"{EXACT:g} relative; {LIMIT:g} for normalised rewards",
)
def audit_rewards(recorded: RecordedStep) -> str | None:
    if not recorded.is_ours("scores"):
        return (
            "a user's node writes the scores" if recorded.is_written("scores") else NOT_APPLICABLE
        )
    recorded = recorded.everyone
    scored = [sample for sample in recorded.samples if sample["valid"]]
    expected = [_on_tokens(recorded, each) for each in scored]
    limit = EXACT
    # turns have multiples of a unit, by the largest score of the group
    if recorded.is_written("turn_index"):
        limit += 2.0**-50 * max((abs(value) for row in expected for value in row), default=0.0)
    check_close(scored, "token_level_scores", expected, limit, _by_its_scores)
    for sample in scored:
        _same_baseline(recorded, sample)
        _own_scores(recorded, sample)
    if recorded.is_written("srpo_distance"):
        if not recorded.is_whole:
            return "SRPO compares all episodes of the step"
        # no other run imports it
        from distflow.audit.simulators.srpo_rewards_and_levels import check_srpo

        check_srpo(recorded)
        return None
    if recorded.is_written("token_level_rewards") and not recorded.is_ours("token_level_rewards"):
        return "a user's node writes the rewards"
    why_not = [_check_processed(recorded, *each) for each in recorded.by_algorithm() if each[2]]
    return next(filter(None, why_not), None)


def _by_its_scores(sample: Sample) -> str:
    return f", by its scores {dict(sample['reward_parts'])}"


def _on_tokens(recorded: RecordedStep, sample: Sample) -> list[float]:
    """The score of each token: what no turn got is on the policy's last one."""
    total = _total(recorded, sample)
    of_turns = rewards_of_turns(recorded, sample, total)
    if of_turns is None and "turn_index" not in sample:
        expected = [0.0] * len(sample["response_ids"])
    else:
        expected = (_of_turns(sample) if of_turns is None else of_turns).tolist()
    if recorded.config.algorithm.reward_level != "token":
        # no other run imports it
        from distflow.audit.simulators.srpo_rewards_and_levels import rewards_of_steps

        of_steps = rewards_of_steps(recorded, sample, total)
        expected = sample["token_level_scores"].tolist() if of_steps is None else of_steps
    if policy := [token for token, mask in enumerate(sample["response_mask"].tolist()) if mask > 0]:
        expected[policy[-1]] += total - sum(expected)
    return expected


def _of_turns(sample: Sample) -> Tensor:
    """The rewards of an episode's turns if its events are not known: only the last token of a turn
    has one."""
    turn = sample["turn_index"]
    after = torch.cat([turn[1:], turn.new_full((1,), -1)])[: len(turn)]
    return torch.where((turn >= 0) & (turn != after), doubles(sample["token_level_scores"]), 0.0)


def _check_processed(
    recorded: RecordedStep, domain: str, algorithm: AlgorithmConfig, samples: Sequence[Sample]
) -> str | None:
    """Check the rewards of samples with the same settings against their scores."""
    levels = (algorithm.reward_norm.mean_level, algorithm.reward_norm.std_level)
    moments = recorded.run.state.get("reward_moments", {}).get(domain)
    if not recorded.is_whole and over_step(algorithm):
        return (
            "reward_norm and whiten_rewards need all samples of the step, which are too many to "
            "send to all ranks"
        )
    if "running" in levels and moments is None:
        return "rewards before this process were not recorded"
    samples = in_baselines(recorded, algorithm, samples)
    makes_one = is_on(algorithm.reward_norm) or algorithm.reward_clip is not None
    makes_one |= (algorithm.reward_shift, algorithm.reward_scale) != (0, 1)
    counts = [
        [bool(sample["valid"]) and m > 0 for m in sample["response_mask"].tolist()]
        for sample in samples
    ]
    _check_reported(recorded, domain, algorithm, samples, moments)
    rows = []
    for sample, counted, reward in zip(
        samples, counts, finished_rewards(samples, algorithm, moments), strict=True
    ):
        last = max((token for token, counts_too in enumerate(counted) if counts_too), default=-1)
        own = [reward * (token == last) for token in range(len(counted))]
        own = (
            own
            if makes_one or "turn_index" not in sample
            else sample["token_level_scores"].tolist()
        )
        if algorithm.use_kl_in_reward:
            own = [
                each - less
                for each, less in zip(own, _kl_penalty(recorded, sample).tolist(), strict=True)
            ]
        rows.append(own)
    if algorithm.whiten_rewards:
        rows = whitened(rows, counts)
    scored = [(sample, row) for sample, row in zip(samples, rows, strict=True) if sample["valid"]]
    limit = LIMIT if is_on(algorithm.reward_norm) or algorithm.whiten_rewards else EXACT
    check_close(
        [each for each, _ in scored],
        "token_level_rewards",
        [row for _, row in scored],
        limit,
        _by_its_scores,
    )
    return None


def over_step(algorithm: AlgorithmConfig) -> bool:
    """Whether rewards are compared with those of all groups of a step."""
    return (
        "batch" in (algorithm.reward_norm.mean_level, algorithm.reward_norm.std_level)
        or algorithm.whiten_rewards
    )


def _check_reported(
    recorded: RecordedStep,
    domain: str,
    algorithm: AlgorithmConfig,
    samples: Sequence[Sample],
    moments: Mapping[str, float] | None,
) -> None:
    """Check the running moments, and the share of clipped rewards."""
    end = f"/{domain}" if domain else ""
    wanted = dict[str, float]()
    bound = algorithm.reward_clip
    if moments is not None and moments["count"] > algorithm.reward_norm.std_unbiased:
        freedom = moments["count"] - algorithm.reward_norm.std_unbiased
        wanted["reward_norm/running_mean"] = moments["mean"]
        wanted["reward_norm/running_std"] = math.sqrt(moments["squares"] / freedom)
    if bound is not None and recorded.is_whole and not recorded.partial:
        rewards = finished_rewards(samples, replace(algorithm, reward_clip=None), moments)
        scored = [
            abs(value) for value, sample in zip(rewards, samples, strict=True) if sample["valid"]
        ]
        if not any(abs(value - bound) <= LIMIT for value in scored):  # at a bound rounding decides
            wanted["reward_clip/clipped"] = sum(value > bound for value in scored) / max(
                len(scored), 1
            )
    for name, value in wanted.items():
        recorded.run.compared.add(f"{name}{end}")
        found = recorded.metrics.get(f"{name}{end}", value)
        if not abs(found - value) <= LIMIT * max(abs(value), 1.0):
            raise Wrong(
                f"the metric {name}{end} is reported as {found:.6g}, but by its scores it is "
                f"{value:.6g}"
            )


def remember_rewards(recorded: RecordedStep) -> None:
    """Add the scores of all ranks to the moments of all rewards so far, for settings that normalise
    by them. Each rank that shares the step calls this."""
    kept = recorded.run.state.setdefault("reward_moments", {})
    for domain, algorithm in algorithms(recorded.config):
        if "running" not in (algorithm.reward_norm.mean_level, algorithm.reward_norm.std_level):
            continue
        if (domain or "") not in kept and recorded.step > 0:
            continue
        before = kept.get(domain or "", {"count": 0, "mean": 0.0, "squares": 0.0})
        (samples,) = (
            samples for name, _, samples in recorded.by_algorithm() if name == (domain or "")
        )
        counted = in_baselines(recorded, algorithm, samples)
        scores = [math.fsum(s["token_level_scores"].tolist()) for s in counted if s["valid"]]
        scores = [score for own in recorded.run.ranks.gather(scores) for score in own]
        scores = [(score + algorithm.reward_shift) * algorithm.reward_scale for score in scores]
        total = before["count"] + len(scores)
        if not scores:
            continue
        middle = before["mean"] + math.fsum(score - before["mean"] for score in scores) / total
        added = math.fsum((score - middle) ** 2 for score in scores)
        moved = before["count"] * (before["mean"] - middle) ** 2
        kept[domain or ""] = {
            "count": total,
            "mean": middle,
            "squares": before["squares"] + moved + added,
        }


@check(
    "kl_control",
    "the coefficient of the KL in the reward is the config's, or the adaptive controller's update "
    "from the last step's "
    "KL (arXiv:1909.08593)",
    needs=(
        "a pipeline with the KL in the reward, and the previous step in this process or its "
        "checkpoint"
    ),
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
    control = algorithm.kl_ctrl
    suffix = f"/{domain}" if domain else ""
    if recorded.is_whole and recorded.is_ours("token_level_rewards"):
        _same_mean(recorded, algorithm, suffix, samples)
    found = recorded.metrics.get(f"actor/kl_coef{suffix}")
    recorded.run.compared.update((f"actor/kl_coef{suffix}", f"actor/reward_kl_penalty{suffix}"))
    if found is None:
        return "the pipeline does not report its coefficient"
    before = recorded.run.state.get("kl_control", {}).get(domain)
    if control.type == "fixed" or (before is None and recorded.step == 0):
        expected = control.kl_coef
    elif before is None or before["step"] != recorded.step - 1:
        return "the previous step was not recorded"
    else:
        assert control.target_kl is not None and control.horizon is not None, (
            "the config's rules ensure it"
        )
        error = min(max(before["kl"] / control.target_kl - 1.0, -0.2), 0.2)
        expected = max(
            before["coefficient"] * (1.0 + error * before["samples"] / control.horizon), 0.0
        )
    if not abs(found - expected) <= LIMIT * max(abs(expected), 1e-12):
        raise Wrong(
            f"the KL in the reward has the coefficient {found:.6g}, but should have {expected:.6g}"
        )
    return None


def remember_coefficients(recorded: RecordedStep) -> None:
    """Keep the coefficients from which the next step's adaptive controllers start. Called on all
    ranks together."""
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
    """Estimates of the KL from d = log π − log π_ref (Schulman's k1, k2, k3), or `|d|`. A trailing
    + changes only the gradient, which is left to the caller."""
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


def audit_totals(recorded: RecordedStep) -> str | None:
    """The score of every sample is the weighted sum of its parts, or what its workflow returned.
    Without a workflow it reads only a few columns."""
    batch = recorded.batch
    config = recorded.config
    has_workflow = config.actor_rollout_ref.rollout.workflow is not None
    is_known = recorded.is_ours("scores") and (has_workflow or recorded.is_ours("reward_parts"))
    if scoring_models(config.reward_model) or not is_known or "valid" not in batch:
        return NOT_APPLICABLE
    episodes = {sample["uid"]: sample for sample in recorded.samples} if has_workflow else {}
    lengths = batch.lengths("response")
    rows = batch.rows()
    scores = torch.zeros(len(batch)).double()
    scores.index_add_(0, rows, doubles(batch.flat("token_level_scores")))
    columns = zip(
        batch["uid"], batch["domain"], batch["reward_parts"], batch["reward_errors"], strict=True
    )
    numbers = zip(batch["valid"].tolist(), scores.tolist(), lengths.tolist(), strict=True)
    for (uid, domain, parts, error), (valid, found, length) in zip(columns, numbers, strict=True):
        if valid and error is None and length:
            size = 1.0
            if has_workflow:
                wanted = _total(recorded, episodes[uid])
                size += abs(wanted)
            else:
                every = [
                    part.weight * parts.get(part.name, 0.0)
                    for part in parts_of_domain(config, domain)
                ]
                wanted = math.fsum([*every, _overlong(recorded, domain, length)])
                size = max([size, *map(abs, every)])
            if not abs(found - wanted) <= EXACT * size:
                raise Wrong(
                    f"sample {uid} has the score {found:g}, but the weighted sum of its parts "
                    f"{dict(parts)} is "
                    f"{wanted:g}: something is added, left out or weighted otherwise than in "
                    "reward.functions, or than "
                    "the workflow returned"
                )
    return None


def _total(recorded: RecordedStep, sample: Sample) -> float:
    """The weighted sum of the sample's scores, or the score that reward.on_error assigns
    instead."""
    if sample["reward_errors"] is not None:
        fallback = on_error_of(recorded.config.reward, sample["domain"])
        if not isinstance(fallback, float):
            raise Wrong(
                f"sample {sample['uid']} has a score in spite of reward errors: "
                f"{sample['reward_errors']}"
            )
        return fallback
    rollout = recorded.config.actor_rollout_ref.rollout
    record = recorded.record_of(sample)
    weights = functions_of(recorded, sample)
    parts = sample["reward_parts"]
    if rollout.workflow is not None and not recorded.is_ours("reward_parts"):
        if record is None:
            return float(sample["scores"])
        total = _returned(sample, record)
    else:
        every = dict.fromkeys(does_not_apply(sample), 0.0) | parts
        total = _sum_of_parts({name: every.get(name, math.nan) for name in weights}, weights)
        total += _overlong(recorded, sample["domain"], len(sample["response_ids"]))
    if rollout.workflow == "multi_turn":
        of_policy = torch.cat([torch.zeros(1), sample["response_mask"]]) > 0
        num_turns = len(recorded.turns(sample)) or int((of_policy[1:] & ~of_policy[:-1]).sum())
        discount: Any = rollout.workflow_kwargs.get("turn_discount", 1.0)
        total *= discount ** (num_turns - 1)
    if rollout.workflow is not None:
        total -= getattr(recorded.config.reward.limit_penalty, sample["finish_reason"], 0.0)
    # other pipelines add none
    if any("scores" in step.node.contract.writes for step in recorded.run.training_steps):
        models = scoring_models(recorded.config.reward_model, sample["domain"]).items()
        total += sum(parts.get(name, math.nan) * model.weight for name, model in models)
    return total


def _sum_of_parts(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted, and exact in the decimals of the numbers; NaN if a part is missing."""
    if any(map(math.isnan, parts.values())):
        return math.nan
    return float(
        sum(Fraction(repr(value)) * Fraction(repr(weights[name])) for name, value in parts.items())
    )


def _returned(sample: Sample, record: GroupRecord) -> float:
    """The score that the workflow returned for the episode: a number, parts or their `score`, or a
    reward result."""
    ids = (*sample["prompt_ids"].tolist(), *sample["response_ids"].tolist())
    for tokens, returned in (
        values for kind, *values in record.events.get(index_of(sample), ()) if kind == "returned"
    ):
        if tokens != ids:
            raise Wrong(f"sample {sample['uid']} has different tokens than its episode")
        value = getattr(getattr(returned, "reward_result", returned), "value", returned)
        parts: Any = value if isinstance(value, Mapping) else {"score": value}
        own = (
            [parts["score"]]
            if "score" in parts
            else [parts[name] for name in parts if name != "acc"]
        )
        return math.fsum(float(value) for value in own)
    return math.nan  # NaN is never close


def _own_scores(recorded: RecordedStep, sample: Sample) -> None:
    """Check that the tokens of each agent with rewards of its own earn what the workflow returned
    for it."""
    record = recorded.record_of(sample)
    agents = [*recorded.config.actor_rollout_ref.rollout.agents]
    is_changed = (
        getattr(recorded.config.reward.limit_penalty, sample["finish_reason"], 0.0)
        or sample["reward_errors"]
    )
    if record is None or is_changed or recorded.config.algorithm.agent_rewards == "shared":
        return
    earned = dict.fromkeys(agents, 0.0)
    scores = doubles(sample["token_level_scores"])
    for talk in conversations_of(sample):
        own = scores[max(talk.first, 0) : talk.first + len(talk.ids)]
        name = talk.name.partition(".")[0]
        earned[name if name in earned else agents[0]] += float(own.sum())
    for _, returned in (
        event[1:] for event in record.events.get(index_of(sample), ()) if event[0] == "returned"
    ):
        for agent in earned.keys() & returned.keys() if isinstance(returned, Mapping) else ():
            trained = recorded.config.actor_rollout_ref.rollout.agents[agent].trainable
            if trained and not abs(earned[agent] - float(returned[agent])) <= LIMIT * max(
                abs(earned[agent]), 1.0
            ):
                raise Wrong(
                    f"agent {agent} earned {earned[agent]:g} in sample {sample['uid']}, but its "
                    "workflow returned "
                    f"{float(returned[agent]):g} for it"
                )


def _same_baseline(recorded: RecordedStep, sample: Sample) -> None:
    """Check that ReMax's baseline is the reward functions' score of the group's one greedy
    response."""
    record = recorded.record_of(sample)
    if (
        "reward_baselines" not in sample
        or record is None
        or not recorded.is_ours("reward_baselines")
    ):
        return
    if algorithm_of(recorded.config, sample["domain"]).adv_estimator != "remax":
        return
    group = f"group {record.prompt_group.group_id}"
    found = [(request, result[0]) for request, result in record.generated if request.params.greedy]
    if len(found) != 1:
        raise Wrong(f"{group} has {len(found)} greedy responses, but its baseline needs one")
    request, response = found[0]
    if request.params.max_tokens != response_limit(recorded.config, sample["domain"]):
        raise Wrong(f"the greedy response of {group} may have {request.params.max_tokens} tokens")
    text = str(
        recorded.run.resources.tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
    )
    total = _overlong(recorded, sample["domain"], len(response.token_ids))
    for name, weight in functions_of(recorded, sample).items():
        results = [
            r
            for called, arguments, r in record.scored
            if called == name and arguments["solution_str"] == text
        ]
        if not results or not isinstance(results[-1], Score):
            raise Wrong(f"the greedy response of {group} has no score of '{name}' for its baseline")
        total += weight * results[-1].value
    if not abs(float(sample["reward_baselines"]) - total) <= LIMIT * max(abs(total), 1.0):
        raise Wrong(
            f"the baseline of sample {sample['uid']} is {float(sample['reward_baselines']):g}, its "
            "greedy response's "
            f"score {total:g}"
        )


def _overlong(recorded: RecordedStep, domain: str, length: int) -> float:
    """The penalty: 0 up to the zone before the limit, falling to −factor at the limit (DAPO,
    arXiv:2503.14476)."""
    zone = recorded.config.reward.overlong
    if zone.buffer_tokens <= 0:
        return 0.0
    inside = length - (response_limit(recorded.config, domain) - zone.buffer_tokens)
    return -zone.factor * min(max(inside / zone.buffer_tokens, 0.0), 1.0)


def _kl_penalty(recorded: RecordedStep, sample: Sample) -> Tensor:
    domain = sample["domain"]
    algorithm = algorithm_of(recorded.config, domain)
    is_own = domain in recorded.config.algorithm.domains
    coefficient = recorded.metrics.get(
        f"actor/kl_coef/{domain}" if is_own else "actor/kl_coef", 0.0
    )
    if algorithm.kl_ctrl.type == "fixed":
        coefficient = algorithm.kl_ctrl.kl_coef
    difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
    penalty = coefficient * kl(difference, algorithm.kl_penalty)
    return torch.where(sample["response_mask"] > 0, penalty, 0.0)


def _same_mean(
    recorded: RecordedStep, algorithm: AlgorithmConfig, suffix: str, samples: Sequence[Sample]
) -> None:
    """Check that the controller's input is the mean KL over valid samples' tokens, or the mean of
    samples' means."""
    of_samples = list[Tensor]()
    for sample in in_baselines(recorded, algorithm, samples):
        counted = (sample["response_mask"] > 0) & bool(sample["valid"])
        difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
        of_samples.append(kl(difference, algorithm.kl_penalty)[counted])
    if algorithm.kl_ctrl.mean == "sequence":
        expected = float(
            torch.stack([values.sum() / max(len(values), 1) for values in of_samples]).mean()
        )
    else:
        tokens = torch.cat(of_samples)
        expected = float(tokens.sum() / max(len(tokens), 1))
    found = recorded.metrics.get(f"actor/reward_kl_penalty{suffix}")
    if found is not None and not abs(found - expected) <= 1e-3 * abs(expected) + 1e-6:
        raise Wrong(
            f"the controller was given a KL of {found:.6g}, but the KL of the step's tokens is "
            f"{expected:.6g}"
        )
