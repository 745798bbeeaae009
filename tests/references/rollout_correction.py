"""Corrections for an engine whose policy differs from the trainer's. A gap is log π_trainer −
log π_rollout of a token under the loss mask; each list is of one response."""

import math
from collections.abc import Sequence

from tests.references import numbers

Threshold = float | tuple[float, float]
Gaps = Sequence[Sequence[float]]


def bounded_exp(gap: float) -> float:
    return math.exp(numbers.clamp(gap, -20.0, 20.0))


def raw_weights(gaps: Sequence[float], level: str) -> list[float]:
    """π_trainer / π_rollout of each token; of the whole response; or its geometric mean."""
    if level == "token":
        return [bounded_exp(gap) for gap in gaps]
    total = math.fsum(gaps)
    if level == "geometric":
        total /= max(len(gaps), 1)
    return [bounded_exp(total)] * len(gaps)


def corrected(weight: float, threshold: Threshold) -> float:
    """Truncated at the threshold; 0 outside a band (IcePop, arXiv:2510.18855)."""
    if not isinstance(threshold, tuple):
        return min(weight, threshold)
    return weight if threshold[0] <= weight <= threshold[1] else 0.0


def importance_weights(
    rows: Gaps, level: str, threshold: Threshold = 2.0, batch_normalize: bool = False
) -> tuple[list[list[float]], dict[str, float]]:
    raw = [raw_weights(gaps, level) for gaps in rows]
    weights = [[corrected(weight, threshold) for weight in row] for row in raw]
    of_tokens = [weight for row in raw for weight in row]
    after = [weight for row in weights for weight in row]
    changed = sum(one != other for one, other in zip(of_tokens, after, strict=True))

    # the weight of a response is one draw, however long it is
    draws = after if level == "token" else [row[0] for row in weights if row]

    stats = {
        "rollout_is_mean": numbers.mean(of_tokens) if of_tokens else 0.0,
        "rollout_is_max": max(of_tokens, default=0.0),
        "rollout_is_corrected_frac": changed / max(len(after), 1),
        "rollout_is_eff_sample_size": numbers.effective_sample_size(draws),
    }
    if batch_normalize:
        factor = numbers.mean(draws) if draws else 0.0
        factor = factor if factor > 1e-8 else 1.0
        weights = [[weight / factor for weight in row] for row in weights]
        stats["rollout_is_batch_norm_factor"] = factor

    return weights, stats


def divergences(gaps: Sequence[float], name: str) -> list[float]:
    """verl's statistic of each token: of itself, or the sum, mean or maximum of its response."""
    level, _, kind = name.rpartition("_")
    found = []
    for gap in gaps:
        d = numbers.clamp(gap, -20.0, 20.0)
        found.append({"k1": -d, "k2": d * d / 2.0, "k3": math.exp(d) - 1.0 - d}[kind])

    if level == "token" or not found:
        return found

    if level == "seq_sum":
        total = math.fsum(found)
    elif level == "seq_mean":
        total = math.fsum(found) / len(found)
    else:
        total = max(found)

    return [total] * len(found)


def passes(value: float, name: str, bounds: tuple[float | None, float]) -> bool:
    lower, upper = bounds
    if not name.endswith("k1"):
        return value <= upper
    if lower is None:
        lower = 1.0 / upper
    return math.log(lower) <= value <= math.log(upper)


def reject(
    rows: Gaps, names: Sequence[str], bounds: Sequence[tuple[float | None, float]]
) -> tuple[list[list[bool]], dict[str, float]]:
    """(which tokens stay, statistics)."""
    num_tokens = max(sum(len(gaps) for gaps in rows), 1)
    kept = [[True] * len(gaps) for gaps in rows]

    stats = {}
    for name, bound in zip(names, bounds, strict=True):
        values = []
        num_masked = 0
        for gaps, own in zip(rows, kept, strict=True):
            for token, value in enumerate(divergences(gaps, name)):
                is_in = passes(value, name, bound)
                values.append(value)
                num_masked += not is_in
                own[token] = own[token] and is_in

        stats[f"{name}_mean"] = math.fsum(values) / num_tokens
        stats[f"{name}_masked"] = num_masked / num_tokens

    with_tokens = [own for own in kept if own]
    stats["masked"] = sum(own.count(False) for own in with_tokens) / num_tokens
    num_hit = sum(not all(own) for own in with_tokens)
    stats["seq_masked"] = num_hit / max(len(with_tokens), 1)

    return kept, stats


def mismatch(gaps: Sequence[float]) -> dict[str, float]:
    """Figures of all tokens. k3 estimates KL(rollout ‖ trainer)."""
    weights = [bounded_exp(gap) for gap in gaps]
    k3 = [math.exp(d) - 1.0 - d for d in (numbers.clamp(gap, -20.0, 20.0) for gap in gaps)]
    return {
        "mean_abs": math.fsum(map(abs, gaps)) / max(len(gaps), 1),
        "max_abs": max(map(abs, gaps), default=0.0),
        "k3": math.fsum(k3) / max(len(gaps), 1),
        "ess": numbers.effective_sample_size(weights),
    }


def cause(version: int, first_version: int, step: int, keeps_kv: bool = True) -> str:
    """Why engine and trainer may differ on a token. first_version: of the first token of its run of
    the policy's tokens."""
    if keeps_kv and version != first_version:
        return "older_kv"
    return "same_version" if version == step else "older_version"


def keep_on_policy(
    gaps: Sequence[float], advantages: Sequence[float], threshold: float
) -> list[bool]:
    """DeepSeek-V3.2 (arXiv:2512.02556): which tokens stay in the loss. A token with A <
    0 is out if the mean of log π_rollout − log π of its response is above the threshold."""
    middle = -math.fsum(gaps) / len(gaps)
    return [not (advantage < 0 and middle > threshold) for advantage in advantages]


def proximal(now: float, old: float, version: int, step: int) -> float:
    """AReaL's log-linear approximation: log-probs move evenly from the token's version to the one
    that the update of this step makes."""
    if version >= step or version < 0:
        return old
    share = (step - version) / (step + 1 - version)
    return (1.0 - share) * old + share * now
