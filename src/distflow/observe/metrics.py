"""The metrics of a run in one table: what each means, its unit, and how parts of it are combined.

A name is a path with "/" (`actor/pg_loss`); "*" in the table stands for one or more parts of a path.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

Kind = Literal["mean", "sum", "max", "min", "last", "percentile"]
Nested: TypeAlias = dict[str, "float | Nested"]


TIMED_OUT = "no score within"
"""How the text of a reward error begins that counts as a timeout."""


@dataclass(frozen=True)
class Metric:
    """One metric or family of metrics.

    kind: how values of parts (ranks, mini-batches) become one; "mean" is weighted by what was averaged over, "last" is
    a state such as a learning rate, and a "percentile" can only be taken over all values at once.
    """

    name: str
    kind: Kind
    doc: str
    unit: str = ""


METRICS = (
    Metric("sft/loss", "mean", "mean cross-entropy of a target token in supervised training", "nats"),
    Metric("sft/val_loss", "mean", "the same on validation texts", "nats"),
    Metric("sft/grad_norm", "mean", "norm of the gradient before clipping in supervised training"),
    Metric("sft/lr", "last", "learning rate in supervised training"),
    Metric("actor/loss", "sum", "total loss of the policy: policy gradient, KL and entropy terms together"),
    Metric("actor/pg_loss", "sum", "policy-gradient part of the loss; near 0 on-policy, its gradient is what counts"),
    Metric("actor/kl_loss", "sum", "KL to the reference as it enters the loss, before its coefficient", "nats"),
    Metric("actor/pg_clipfrac", "mean", "share of response tokens whose probability ratio was clipped", "share"),
    Metric("actor/pg_clipfrac_lower", "mean", "share of response tokens stopped by the dual clip", "share"),
    Metric("actor/ppo_kl", "mean", "mean of old minus new log-prob: how far the updates of this step moved", "nats"),
    Metric(
        "actor/log_ratio_abs",
        "mean",
        "mean absolute log-ratio to the old policy over the updates of this step; the first update has 0",
        "nats",
    ),
    Metric("actor/behave_kl", "mean", "decoupled PPO: mean log-prob by the engine less the proximal one", "nats"),
    Metric("actor/behave_imp_weight", "mean", "decoupled PPO: mean weight of a token, after the cap"),
    Metric("actor/behave_capped", "mean", "decoupled PPO: share of tokens whose weight is outside its bounds", "share"),
    Metric("actor/rollout_is_weight", "mean", "mean weight of a token by the correction in the loss"),
    Metric("actor/rollout_is_corrected", "mean", "share of tokens whose weight this correction changed", "share"),
    Metric("actor/entropy", "mean", "mean entropy of the next token: how undecided the policy is", "nats"),
    Metric("actor/grad_norm", "mean", "norm of the policy's gradient before clipping"),
    Metric("actor/lr", "last", "learning rate of the policy"),
    Metric("actor/skipped", "sum", "optimizer steps not taken: loss or gradient not finite, or no token", "steps"),
    Metric("actor/empty", "sum", "of these, steps whose mini-batch had no token under the loss mask", "steps"),
    Metric("actor/reward_kl_penalty", "mean", "KL to the reference as it is taken off the reward", "nats"),
    Metric("actor/kl_coef", "last", "coefficient of the KL penalty in the reward"),
    Metric("actor/reward_kl_penalty/*", "mean", "the same of one domain of algorithm.domains", "nats"),
    Metric("actor/kl_coef/*", "last", "the same of one domain of algorithm.domains"),
    Metric("reward_norm/running_mean", "last", "mean of all rewards so far, by which they are normalised"),
    Metric("reward_norm/running_mean/*", "last", "the same of one domain"),
    Metric("reward_norm/running_std", "last", "their standard deviation"),
    Metric("reward_norm/running_std/*", "last", "the same of one domain"),
    Metric("reward_clip/clipped", "mean", "share of samples whose reward was cut to algorithm.reward_clip", "share"),
    Metric("reward_clip/clipped/*", "mean", "the same of one domain", "share"),
    Metric("advantage_clip/clipped", "mean", "share of tokens cut to algorithm.advantage_clip", "share"),
    Metric("advantage_clip/clipped/*", "mean", "the same of one domain", "share"),
    Metric("sample_mask/truncated", "mean", "share of samples left out of the loss as truncated", "share"),
    Metric("sample_mask/truncated/*", "mean", "the same of one domain", "share"),
    Metric("sample_mask/long_errors", "mean", "share left out because they are wrong and too long", "share"),
    Metric("sample_mask/long_errors/*", "mean", "the same of one domain", "share"),
    Metric("sample_mask/difficulty", "mean", "share left out because their prompt is too easy or too hard", "share"),
    Metric("sample_mask/difficulty/*", "mean", "the same of one domain", "share"),
    Metric("rollout_corr/rollout_is_max", "max", "largest importance weight, trainer over rollout policy, uncorrected"),
    Metric("rollout_corr/rollout_is_mean", "mean", "mean importance weight, uncorrected"),
    Metric(
        "rollout_corr/rollout_is_corrected_frac", "mean", "share of tokens whose weight the correction changed", "share"
    ),
    Metric(
        "rollout_corr/rollout_is_eff_sample_size",
        "mean",
        "effective sample size of the corrected weights, as a share of the samples",
        "share",
    ),
    Metric(
        "rollout_corr/rollout_is_batch_norm_factor", "mean", "mean of the corrected weights, by which they were divided"
    ),
    Metric("rollout_corr/on", "last", "1 once the mismatch was too large: the correction is on from the next step"),
    Metric("rejection/*masked", "mean", "share of tokens (seq_masked: of sequences) that are masked out", "share"),
    Metric("rejection/*", "mean", "mean of the quantity that the rejection tests"),
    Metric("critic/loss", "sum", "total loss of the value model"),
    Metric("critic/vf_loss", "sum", "clipped loss of the value model"),
    Metric("critic/vf_clipfrac", "mean", "share of values that were clipped", "share"),
    Metric("critic/grad_norm", "mean", "norm of the value model's gradient before clipping"),
    Metric("critic/lr", "last", "learning rate of the value model"),
    Metric("critic/skipped", "sum", "optimizer steps of the value model that were not taken", "steps"),
    Metric("critic/empty", "sum", "of these, steps whose mini-batch had no token under the loss mask", "steps"),
    Metric("reward/mean_score", "mean", "mean score of this step's samples, without reward errors"),
    Metric("reward/std", "mean", "standard deviation of the scores of this step"),
    Metric(
        "reward/frac_reward_zero_std",
        "mean",
        "share of groups in which all responses got the same reward: they carry no gradient",
        "share",
    ),
    Metric("reward/errors", "sum", "reward errors: left out of every mean, never counted as a score of 0", "samples"),
    Metric("reward/timeouts", "sum", "reward calls that timed out", "samples"),
    Metric("reward/retries", "sum", "reward calls that failed and were retried", "calls"),
    Metric(
        "reward/retried_calls", "sum", "reward calls repeated because the process or actor that ran them died", "calls"
    ),
    Metric("reward/calls", "sum", "reward calls, those on dropped groups included", "samples"),
    Metric("reward/error_rate", "mean", "share of reward calls that failed, by an error or a timeout", "share"),
    Metric("reward/*/mean_score", "mean", "mean score of a domain's samples, without reward errors"),
    Metric("reward/*/mean", "mean", "mean of one part of the reward, over all domains"),
    Metric("reward/errors/*", "sum", "reward errors of one part, over all domains", "samples"),
    Metric("reward/timeouts/*", "sum", "reward calls of one part that timed out, over all domains", "samples"),
    Metric("reward/cut/*", "sum", "samples whose text was longer than the reward model of that part reads", "samples"),
    Metric("reward/*/*", "mean", "mean of one part of the reward of a domain"),
    Metric("domains/*/groups", "sum", "groups of the domain in this step", "groups"),
    Metric("domains/*/share", "last", "share of this step's groups that the curriculum gives the domain", "share"),
    Metric("domains/*/accuracy", "mean", "share of correct responses, as reported to the curriculum", "share"),
    Metric("domains/*/learnability", "mean", "mean of p · (1 - p) over the prompts reported to it"),
    Metric("domains/*/calls", "sum", "reward calls on responses of the domain", "samples"),
    Metric("domains/*/errors", "sum", "of these, reward errors", "samples"),
    Metric("domains/*/timeouts", "sum", "of these, timeouts", "samples"),
    Metric("domains/*", "last", "groups of a domain by state, counted since the start", "groups"),
    Metric("rollout/avg_response_length", "mean", "mean length of a response", "tokens"),
    Metric("rollout/avg_prompt_length", "mean", "mean length of a prompt", "tokens"),
    Metric("rollout/truncated", "mean", "share of responses that hit the length limit", "share"),
    Metric("rollout/*/p*", "percentile", "percentile over the samples of this step"),
    Metric("async/stale_data_count", "sum", "groups dropped because they were too old", "groups"),
    Metric("async/aborted", "last", "groups aborted because their step was already full", "groups"),
    Metric("async/aborted_tokens", "last", "tokens sampled for those groups and discarded", "tokens"),
    Metric("async/version_diff/max", "max", "staleness of the oldest token trained on", "versions"),
    Metric("async/version_diff/*", "mean", "staleness of the trained tokens", "versions"),
    Metric("async/staleness/*", "mean", "share of the trained tokens with this staleness", "share"),
    Metric("async/version_start", "min", "lowest weight version among the tokens of this step"),
    Metric("async/version_end", "max", "highest weight version among the tokens of this step"),
    Metric("async/*", "last", "groups by state, counted since the start", "groups"),
    Metric("val_correct/all/mean", "mean", "share of validation problems solved", "share"),
    Metric("val_correct/*/mean", "mean", "share of this domain's validation problems solved", "share"),
    Metric(
        "val_correct/*/pass@*",
        "mean",
        "chance that one of k samples is correct, from n samples a problem (arXiv:2107.03374, equation 1)",
        "share",
    ),
    Metric("val_correct/*/mean@*", "mean", "share of correct responses among all n samples of each problem", "share"),
    Metric("val_correct/*", "mean", "accuracy on validation problems", "share"),
    Metric("mismatch/*/share", "mean", "share of the tokens whose difference has this cause", "share"),
    Metric("mismatch/same_version/*", "max", "for tokens of the trainer's own weight version: numerics", "nats"),
    Metric("mismatch/older_version/*", "max", "for tokens of older weights: staleness", "nats"),
    Metric("mismatch/older_kv/*", "max", "for tokens over keys and values of older weights", "nats"),
    Metric("mismatch/*", "max", "difference between the engine's and the trainer's log-probs", "nats"),
    Metric("canary/*", "max", "difference on fixed prompts between the engine's and the trainer's log-probs", "nats"),
    Metric("timing_s/step", "max", "wall time of the whole step; the phases add up to it", "s"),
    Metric("timing_s/other", "max", "time of the step outside every named phase; one of those that add up", "s"),
    Metric("timing_s/audit", "max", "time of the auditor", "s"),
    Metric("timing_s/*", "max", "time of this phase, without the phases inside it", "s"),
    Metric("throughput/tokens_per_s", "sum", "tokens trained on, prompts too, per second of the step", "tokens/s"),
    Metric("throughput/*", "sum", "work done per second", "1/s"),
    Metric("memory/process/peak", "max", "peak resident memory of the process since it started", "bytes"),
    Metric("memory/process/*", "max", "the same in this phase alone; without reward processes", "bytes"),
    Metric("memory/cuda/peak", "max", "the most that torch had allocated on the accelerator since the start", "bytes"),
    Metric("memory/cuda/*", "max", "the same in this phase alone", "bytes"),
    Metric("memory/*", "max", "memory in use", "bytes"),
)


class Headline(NamedTuple):
    """One number of a step's line of text. names: of the metrics that may carry it, the first present one counts.
    width: of the formatted value, which is filled up to it, so that lines stand under one another."""

    label: str
    names: tuple[str, ...]
    form: str
    width: int

    def text(self, value: float) -> str:
        """The value, of `width` characters where it is of a usual size, and never longer than 9."""
        shown = format(value, self.form)
        return format(shown if len(shown) <= 9 else format(value, ".2e"), f">{self.width}")


HEADLINES = (
    Headline("reward", ("reward/mean_score",), ".3f", 6),
    Headline("loss", ("sft/loss", "loss"), ".4f", 7),
    Headline("val loss", ("sft/val_loss",), ".4f", 7),
    Headline("accuracy", ("val_correct/all/mean",), ".3f", 5),
    Headline("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), ".4f", 7),
    Headline("entropy", ("actor/entropy",), ".3f", 6),
    Headline("length", ("rollout/avg_response_length",), ".1f", 6),
    Headline("truncated", ("rollout/truncated",), ".0%", 4),
    Headline("grad norm", ("actor/grad_norm", "sft/grad_norm"), ".3f", 6),
    Headline("tokens/s", ("throughput/tokens_per_s",), ",.0f", 7),
)

_LEAF = "/"  # the key of a value at a name that is also the start of other names; no part of a name can be "/"


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The first entry of the table that fits a name."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


@lru_cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".+".join(re.escape(part) for part in name.split("*")))


def headlines(values: Mapping[str, float]) -> dict[Headline, float]:
    """The metrics among these that a line of text shows."""
    present = {line: next((name for name in line.names if name in values), None) for line in HEADLINES}
    return {line: values[name] for line, name in present.items() if name is not None}


def nest(values: Mapping[str, float]) -> Nested:
    """{"actor/loss": 1.0} → {"actor": {"loss": 1.0}}; `flatten` gives back exactly what went in."""
    root: Nested = {}
    for name, value in values.items():
        *branches, leaf = name.split("/")
        node = root
        for branch in branches:
            child = node.setdefault(branch, {})
            if not isinstance(child, dict):
                child = node[branch] = {_LEAF: child}
            node = child
        if isinstance(below := node.get(leaf), dict):
            below[_LEAF] = value
        else:
            node[leaf] = value
    return root


def flatten(nested: Mapping[str, object]) -> dict[str, object]:
    """{"actor": {"loss": 1.0}} → {"actor/loss": 1.0}."""
    return {"/".join(parts): value for parts, value in _leaves(nested, ())}


def _leaves(nested: Mapping[str, object], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in nested.items():
        if key == _LEAF:
            yield above, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


Measured = tuple[Mapping[str, float], float]
"""Metrics by name, and their weight: what their means were averaged over (samples, tokens)."""


def combine(parts: Sequence[Measured]) -> dict[str, float]:
    """One set of metrics from those of parts.

    A metric that only some parts have is combined over those. A name that is not in the table is a mean. Raises
    ValueError for a percentile in more than one part: it cannot be had from the percentiles of parts.
    """
    gathered: dict[str, list[tuple[float, float]]] = {}
    for values, weight in parts:
        for name, value in values.items():
            gathered.setdefault(name, []).append((value, weight))
    return {name: _combine_one(name, pairs) for name, pairs in gathered.items()}


def _combine_one(name: str, pairs: list[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    if len(values) == 1:
        return values[0]
    metric = find_metric(name)
    kind = metric.kind if metric else "mean"
    if kind == "percentile":
        raise ValueError(f"{name} is a percentile: take it over all values at once with `distribution`")
    if kind == "mean":
        total = sum(weight for _, weight in pairs)
        return sum(value * weight for value, weight in pairs if weight) / total if total else 0.0
    if kind == "last":
        return values[-1]
    if kind == "sum":
        return sum(values)
    # max() and min() of Python lose a NaN or keep it by its position; a NaN anywhere must be seen.
    nan = next((value for value in values if value != value), None)
    return nan if nan is not None else (max(values) if kind == "max" else min(values))


def distribution(name: str, values: Sequence[float], percentiles: Sequence[int] = (50, 95)) -> dict[str, float]:
    """`name/mean`, `name/min`, `name/max` and `name/pK` (linear interpolation between ranks); empty for no values."""
    if not values:
        return {}
    ranked = sorted(values)
    result = {f"{name}/mean": sum(ranked) / len(ranked), f"{name}/min": ranked[0], f"{name}/max": ranked[-1]}
    for percentile in percentiles:
        position = percentile / 100 * (len(ranked) - 1)
        below = int(position)
        above = min(below + 1, len(ranked) - 1)
        result[f"{name}/p{percentile}"] = ranked[below] + (position - below) * (ranked[above] - ranked[below])
    return result


def markdown_table() -> str:
    """The table of metrics as it stands in `docs/observe.md`."""
    lines = ["| metric | unit | parts combine by | what it is |", "|---|---|---|---|"]
    lines += [f"| `{metric.name}` | {metric.unit} | {metric.kind} | {metric.doc} |" for metric in METRICS]
    return "\n".join(lines) + "\n"
