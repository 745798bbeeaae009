"""Check: a step's metrics match its own samples and updates."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from distflow.audit.audited_step.node_and_queue_metrics import (
    NOT_RECOMPUTED,
    between,
    merged,
    parts_of,
)
from distflow.audit.audited_step.normalization_formulas import centred
from distflow.audit.check import Sample, Wrong, check, doubles
from distflow.audit.recorded_step import RecordedStep, conversations_of
from distflow.config.keys.reward import scoring_models
from distflow.data.batch import Batch
from distflow.observe.metrics import find_metric
from distflow.rewards.reward_results import RIGHT
from distflow.runtime.step_metrics import sample_rows

LIMIT = 1e-4
COLUMNS = {
    "uid": "uid",
    "prompt": "prompts",
    "response": "responses",
    "ground_truth": "ground_truth",
}
COLUMNS |= {"errors": "reward_errors", "extra": "reward_extra"}
COLUMNS |= {name: name for name in ("domain", "finish_reason", "reward_parts")}
"""Entries of the samples file, and their columns."""


@check(
    "metrics",
    "the reported scores, reward parts, lengths, truncated share, share of groups with equal "
    "scores and staleness "
    "are computed from the step's samples, metrics of updates are means over the step's "
    "mini-batches, and in audited "
    "steps metrics of nodes are means over all ranks",
    needs="metrics of the built-in nodes",
    limit=f"{LIMIT:g} relative",
)
def audit_metrics(recorded: RecordedStep) -> str | None:
    audit_step_metrics(recorded)
    own = {name: (values, weight) for name, values, weight in parts_of(recorded)}
    wanted = merged(recorded.run.ranks.gather(own))
    _compare(
        recorded,
        ((name, between(recorded.metrics.get(name, 0.0), values)) for name, values in wanted),
    )
    left = [name for name in recorded.metrics if name not in recorded.run.compared]
    left = [
        name for name in left if not any(fnmatchcase(name, pattern) for pattern in NOT_RECOMPUTED)
    ]
    return f"nothing computes {', '.join(left[:5])} again" if left else None


def audit_step_metrics(recorded: RecordedStep) -> str | None:
    _compare(recorded, (*_of_samples(recorded), *_of_updates(recorded), *_of_nodes(recorded)))
    _check_calls(recorded)
    return None


def remember_trained(recorded: RecordedStep) -> None:
    """Count the groups that were trained on since the run's start, unless audits were off in some
    steps."""
    kept = recorded.run.state.setdefault("trained", {})
    if recorded.step == kept.get("steps", 0):
        kept |= {
            "groups": kept.get("groups", 0) + len(recorded.group_ids),
            "steps": recorded.step + 1,
        }
    else:
        kept.clear()


def audit_staleness(recorded: RecordedStep) -> str | None:
    """Check the metrics that a step has once it is released."""
    _compare(recorded, (*_of_versions(recorded), *_of_groups(recorded)))
    _check_dropped(recorded)
    _check_throughput(recorded)
    return None


def _check_dropped(recorded: RecordedStep) -> None:
    """At staleness 0 no group is dropped between a step and its counts."""
    data = recorded.run.spec.data
    known = recorded.run.state.get("dropped", {}).get("reasons", {})
    if data.max_staleness or data.oversampling or len(recorded.run.spec.plan.ranks) > 1:
        return
    for reason, number in known.items():
        if (found := recorded.metrics.get(f"async/dropped/{reason}", 0.0)) != number:
            raise Wrong(
                f"{found:.0f} groups are counted as dropped for {reason} (async/dropped/{reason}), "
                "but nodes dropped "
                f"{number}: the ledger and the metrics give another reason, or count other groups"
            )


def _check_throughput(recorded: RecordedStep) -> None:
    """Check the throughput of the step checked last, which it was given afterwards: its tokens over
    its time."""
    run = recorded.run
    last = recorded.run.released
    name = "throughput/tokens_per_s"
    tokens = last.get("tokens", 0.0)
    metrics = last.get("metrics", {})
    own = float(recorded.batch.lengths("sequence").sum())
    last |= {"tokens": run.ranks.sum(own), "metrics": recorded.metrics}
    told = metrics.get(name)
    seconds = metrics.get("timing_s/step")
    if told is not None and seconds and abs(told * seconds - tokens) > LIMIT * tokens + 1e-6:
        raise Wrong(
            f"{name} of the step before is reported as {told:.6g}, but its {tokens:.0f} tokens in "
            f"{seconds:.6g} s "
            f"(timing_s/step) are {tokens / seconds:.6g}: it counts other tokens, or another time. "
            "Weights are not "
            "affected, but do not trust this run's speed; correct the code that computes it"
        )


@check(
    "samples",
    "each row of the samples file matches its sample: texts, domain, scores, errors, lengths, "
    "versions, accuracy, mean "
    "advantage, share of masked tokens",
    needs="a step that is audited",
    limit=f"{LIMIT:g} relative",
)
def audit_sample_rows(recorded: RecordedStep) -> str | None:
    batch = recorded.batch
    names = [name for name in ("token_level_scores", "advantages", "loss_mask") if name in batch]
    numbers, *sums = (_sums(batch, name) for name in ("response_mask", *names))
    for place, (sample, row) in enumerate(zip(recorded.samples, sample_rows(batch), strict=True)):
        number = numbers[place]
        of_policy = {name: own[place] for name, own in zip(names, sums, strict=True)}
        is_scored = bool(sample["valid"]) and "token_level_scores" in sample
        wanted = {name: sample[column] for name, column in COLUMNS.items() if column in sample}
        wanted |= {
            "prompt_length": len(sample["prompt_ids"]),
            "response_length": len(sample["response_mask"]),
        }
        wanted["versions"] = sorted({*sample["versions"].tolist()} - {-1})
        if is_scored:
            wanted["score"] = of_policy["token_level_scores"]
        if is_scored and "acc" in sample and sample.get("reward_errors") is None:
            wanted["acc"] = float(sample["acc"])
        if "advantages" in sample and number:
            wanted["advantage"] = of_policy["advantages"] / number
            wanted["masked"] = 1.0 - of_policy["loss_mask"] / number
        for name, expected in wanted.items():
            found = row[name]
            is_close = isinstance(expected, float) and isinstance(found, float)
            is_close = is_close and abs(found - expected) <= LIMIT * max(abs(expected), 1.0)
            # NaN is not equal to itself
            if found != expected and not is_close and repr(found) != repr(expected):
                raise Wrong(
                    f"the samples file has {found!r} as the {name} of sample {sample['uid']}, but "
                    f"it is {expected!r}: "
                    "its row belongs to another sample, or the code that writes it is wrong. "
                    "Weights are not affected"
                )
    return None


def _sums(batch: Batch, name: str) -> list[float]:
    """The sum of a column over the policy's tokens of each sample."""
    rows = batch.rows()
    values = doubles(batch.flat(name))
    values = torch.where(doubles(batch.flat("response_mask")) > 0, values, 0.0)
    found: list[float] = (
        torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows, values).tolist()
    )
    return found


def _compare(recorded: RecordedStep, wanted: Iterable[tuple[str, float]]) -> None:
    for name, expected in wanted:
        recorded.run.compared.add(name)
        found = recorded.metrics.get(name, expected)
        if (
            repr(found) != repr(expected)
            and not abs(found - expected) <= LIMIT * abs(expected) + 1e-6
        ):
            raise Wrong(
                f"the metric {name} is reported as {found:.6g}, but of the step's own samples and "
                "updates it is "
                f"{expected:.6g}: it covers other samples or steps, includes padding, or is "
                "unweighted. Weights are "
                "not affected, but do not trust this run's curves; correct the code that computes "
                "the metric"
            )


def _of_samples(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """Metrics of samples over all ranks, each of which calls this; scores are those of samples that
    have one."""
    batch = recorded.batch
    lengths = recorded.batch.lengths("response")
    scores = [0.0] * len(recorded.batch)
    if "token_level_scores" in batch:
        scores = _sums(batch, "token_level_scores")
    is_truncated = torch.tensor(
        [reason in ("length", "context", "max_steps") for reason in batch["finish_reason"]],
        dtype=torch.bool,
    )
    has_forks = "forks" in batch and any(batch["forks"])
    longest = torch.tensor([*map(_longest, recorded.samples)]) if has_forks else lengths
    is_right = (
        doubles(batch["acc"]) >= RIGHT if "acc" in batch else torch.full((len(batch),), torch.nan)
    )
    columns = (
        *(longest, batch.lengths("prompt"), is_truncated, batch["valid"].bool()),
        *(scores, batch["group_index"], is_right),
    )
    own = torch.stack([torch.as_tensor(column, dtype=torch.float64) for column in columns])
    # no dict
    parts = batch["reward_parts"] if "reward_parts" in batch else [{}] * len(batch)  # noqa: SIM401
    every = recorded.run.ranks.gather((own, batch["domain"], parts))
    numbers = torch.cat([each[0] for each in every], 1)
    domains = [name for each in every for name in each[1]]
    means = numbers.mean(1).tolist()
    yield "rollout/avg_response_length", means[0]
    yield "rollout/avg_prompt_length", means[1]
    yield "rollout/max_response_length", float(numbers[0].max())
    yield "rollout/truncated", means[2]
    if "token_level_scores" in batch:
        scored = [
            (float(score), group) for _, _, _, valid, score, group, _ in numbers.T.tolist() if valid
        ]
        yield from _of_scores(scored)
        right = numbers[6][numbers[3] > 0]
        if len(right) and not right.isnan().any():
            yield "reward/accuracy", float(right.mean())
    found = defaultdict[str, list[float]](list)
    valid = numbers[3].tolist()
    own_scores = numbers[4].tolist()
    for row, part in enumerate(part for each in every for part in each[2]):
        for name, value in part.items():
            found[f"reward/{name}/mean"].append(value)
            found[f"reward/{domains[row]}/{name}"].append(value)
        if valid[row]:
            found[f"reward/{domains[row]}/mean_score"].append(own_scores[row])
    yield from ((name, math.fsum(values) / len(values)) for name, values in found.items())
    of_domain = Counter(domain for domain, _ in {*zip(domains, numbers[5].tolist(), strict=True)})
    yield from ((f"domains/{name}/groups", count) for name, count in of_domain.items())


def _longest(sample: Sample) -> int:
    """Response tokens of its longest conversation; with branches, counted from the first token
    drawn there."""
    talks = conversations_of(sample)
    drawn = (sample["versions"] >= 0).nonzero()[:, 0].tolist()
    if len(talks) == 1:
        return len(sample["response_ids"])
    ends = [talk.first + len(talk.ids) for talk in talks]
    firsts = [
        [place for place in drawn if talk.first <= place < end]
        for talk, end in zip(talks, ends, strict=True)
    ]
    return max(end - min(first, default=end) for first, end in zip(firsts, ends, strict=True))


def _check_calls(recorded: RecordedStep) -> None:
    """At staleness 0 the samples of a step were scored in that step, so that it has at least as
    many calls and errors. A resumed run may still train on samples that were scored before."""
    run = recorded.run
    metrics = recorded.metrics
    batch = recorded.batch
    config = recorded.config
    is_synchronous = (
        not run.spec.data.max_staleness and config.actor_rollout_ref.rollout.workflow is None
    )
    by_functions = not scoring_models(config.reward_model) and recorded.is_ours("reward_errors")
    if (
        not (is_synchronous and by_functions)
        or "reward/calls" not in metrics
        or "reward_errors" not in batch
    ):
        return
    versions = batch.flat("versions")
    errors = [error is not None for error in batch["reward_errors"]]
    is_older = run.inputs.resumed is not None and bool(
        (versions[versions >= 0] <= run.inputs.version.step).any()
    )
    least = run.ranks.sum(
        {"calls": float(len(batch)), "errors": float(sum(errors)), "older": float(is_older)}
    )
    calls = metrics["reward/calls"]
    found = {"calls": calls, "errors": calls * metrics["reward/error_rate"]}
    for name, number in found.items() if not least["older"] else ():
        if number < least[name] - 0.5:
            raise Wrong(
                f"{number:.0f} reward {name} are reported, but the step's samples alone had "
                f"{least[name]:.0f}: "
                "reward/calls and reward/error_rate do not count all samples or ranks, so that "
                "reward.max_error_rate "
                "has no effect on the others. Correct the code that counts"
            )


def _of_scores(scored: Sequence[tuple[float, float]]) -> Iterator[tuple[str, float]]:
    """scored: score and group number of each sample that has a score."""
    scores = [score for score, _ in scored]
    groups = defaultdict[float, list[float]](list)
    if not scores:
        return
    yield "reward/mean_score", math.fsum(scores) / len(scores)
    yield "reward/std", math.sqrt(math.fsum(each**2 for each in centred(scores)) / len(scores))
    yield "reward/max", max(scores)
    yield "reward/min", min(scores)
    for score, group in scored:
        groups[group].append(score)
    if several := [max(own) == min(own) for own in groups.values() if len(own) > 1]:
        yield "reward/frac_reward_zero_std", sum(several) / len(several)


def _of_versions(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """The staleness of generated tokens, over all ranks, each of which calls this."""
    versions = recorded.batch.flat("versions")
    ages, counts = (recorded.step - versions)[versions >= 0].unique(return_counts=True)
    own = Counter(dict(zip(ages.tolist(), counts.tolist(), strict=True)))
    tokens = sum(recorded.run.ranks.gather(own), Counter[int]())
    if number := tokens.total():
        yield "async/version_diff/mean", sum(age * count for age, count in tokens.items()) / number
        yield "async/version_diff/max", max(tokens)
        yield "async/version_start", recorded.step - max(tokens)
        yield "async/version_end", recorded.step - min(tokens)
        yield from ((f"async/staleness/{age}", count / number) for age, count in tokens.items())


def _of_groups(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """Counts of groups, which must add up. Groups that were trained on are counted from the run's
    start."""
    metrics = recorded.metrics
    kept = recorded.run.state.get("trained")
    data = recorded.run.spec.data
    dropped = [count for name, count in metrics.items() if name.startswith("async/dropped/")]
    yield "async/rejected", math.fsum(dropped)
    yield "async/stale_data_count", metrics.get("async/dropped/stale", 0.0)
    yield "async/submitted", metrics.get("async/enqueued", 0.0)
    if kept and not (data.max_staleness or data.oversampling or data.skips):
        yield "async/accepted", float(kept["groups"])
    yield (
        "async/enqueued",
        math.fsum(
            metrics.get(f"async/{name}", 0.0) for name in ("accepted", "rejected", "running")
        ),
    )


def _of_nodes(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """Metrics of nodes if all ranks run the same ones: means weighted by the ranks' weights, or
    maxima."""
    ports = recorded.run.inputs.ports
    found = defaultdict[str, list[tuple[float, float]]](list)
    if not recorded.measured or ports.data.size == 1 or ports.everyone.size > ports.collective.size:
        return
    own = {
        name: (value, weight)
        for metrics, weight in recorded.measured
        for name, value in metrics.items()
    }
    for name, pair in (each for rank in ports.data.gather(own) for each in rank.items()):
        found[name].append(pair)
    for name, pairs in found.items():
        metric = find_metric(name)
        total = math.fsum(weight for _, weight in pairs)
        if metric is not None and metric.kind == "max":
            yield name, max(value for value, _ in pairs)
        elif total:
            yield name, math.fsum(value * weight for value, weight in pairs if weight) / total


def _of_updates(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """Metrics of roles that one built-in node trains: means over mini-batches with tokens, or
    counts over all."""
    names = [
        getattr(step.node.fn, "keywords", {}).get("name") for step in recorded.run.training_steps
    ]
    for role in {update.role for update in recorded.updates}:
        prefix = role if role in names else "rm" if "rm" in names else "sft"
        if role in recorded.config.dag.policies:
            prefix = f"policies/{role}"
            names.append(prefix)  # trained by the actor's node
        updates = [update.metrics for update in recorded.updates_of(role)]
        found = defaultdict[str, list[float]](list)
        for metrics in [each for each in updates if not each.get("empty")] or updates:
            for name, value in metrics.items():
                found[name].append(value)
        for name, values in found.items() if names.count(prefix) == 1 else ():
            if name not in ("skipped", "empty"):
                yield f"{prefix}/{name}", math.fsum(values) / len(values)
        for name in ("skipped", "empty") if names.count(prefix) == 1 else ():
            yield f"{prefix}/{name}", math.fsum(metrics.get(name, 0.0) for metrics in updates)
