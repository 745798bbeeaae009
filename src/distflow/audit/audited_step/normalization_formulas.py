"""Processing after an estimator or a score, by brute force in float64: normalised, clipped and
whitened values, and weights of samples."""

import math
from collections.abc import Mapping, Sequence

from distflow.audit.check import Sample
from distflow.audit.recorded_step import by_group_of
from distflow.config.keys.algorithm import AlgorithmConfig, NormConfig, is_on

Rows = list[list[float]]
"""A value for each token of each sample, or one per sample."""
Moments = Mapping[str, float]
"""count, mean and squares (the sum of squared differences to the mean) of all rewards so far."""


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def above_mean(value: float, values: Sequence[float]) -> float:
    """The value minus the mean, from differences, which are exact for values that hardly differ."""
    return math.fsum(value - other for other in values) / len(values)


def centred(values: Sequence[float]) -> list[float]:
    """The values minus their mean, which is rounded: so is what it leaves, but by less."""
    middle = mean(values)
    near = [value - middle for value in values]
    rest = mean(near)
    return [value - rest for value in near]


def std(values: Sequence[float]) -> float:
    """The unbiased standard deviation; exactly 0 if all values are equal, or there is only one."""
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    return math.sqrt(math.fsum(v**2 for v in centred(values)) / (len(values) - 1))


def whitening(values: Sequence[float]) -> float:
    """The factor that scales values to variance 1, from the unbiased variance + 1e-8; 1 for a
    single value."""
    return 1.0 / math.sqrt(std(values) ** 2 + 1e-8) if len(values) > 1 else 1.0


def whitened(rows: Rows, counts: Sequence[Sequence[bool]]) -> Rows:
    """Whitened over all values that count; 0 for the others."""
    counted = [
        v for row, own in zip(rows, counts, strict=True) for v, c in zip(row, own, strict=True) if c
    ]
    left = iter(centred(counted))
    scale = whitening(counted)
    return [[next(left) * scale if c else 0.0 for c in own] for own in counts]


def normalized(
    rows: Rows,
    counts: Sequence[Sequence[bool]],
    samples: Sequence[Sample],
    norm: NormConfig,
    moments: Moments | None,
) -> Rows:
    """Normalised by AReaL's `NormConfig`: each value minus the mean of its batch or group, over the
    deviation."""
    if not is_on(norm):
        return rows
    places = [(i, t) for i, own in enumerate(counts) for t, c in enumerate(own) if c]
    values = {place: rows[place[0]][place[1]] for place in places}
    centred = _centred(values, _pools(places, samples, norm, norm.mean_level), norm, moments)
    scaled = _scaled(centred, _pools(places, samples, norm, norm.std_level), norm, moments)
    return [[scaled.get((i, t), 0.0) for t in range(len(row))] for i, row in enumerate(rows)]


def finished_rewards(
    samples: Sequence[Sample], algorithm: AlgorithmConfig, moments: Moments | None
) -> list[float]:
    """The reward of each sample, from its score: shifted, scaled, normalised, clipped."""
    scores = [
        [
            (math.fsum(s["token_level_scores"].tolist()) + algorithm.reward_shift)
            * algorithm.reward_scale
        ]
        for s in samples
    ]
    rows = normalized(
        scores, [[bool(s["valid"])] for s in samples], samples, algorithm.reward_norm, moments
    )
    bound = math.inf if algorithm.reward_clip is None else algorithm.reward_clip
    return [min(max(row[0], -bound), bound) for row in rows]


def finished_advantages(
    rows: Rows,
    counts: Sequence[Sequence[bool]],
    samples: Sequence[Sample],
    algorithm: AlgorithmConfig,
) -> Rows:
    """The estimator's advantages, normalised, clipped and weighted by sample."""
    rows = normalized(rows, counts, samples, algorithm.adv_norm, None)
    if (bound := algorithm.advantage_clip) is not None:
        rows = [[min(max(value, -bound), bound) for value in row] for row in rows]
    weights = sample_weights(samples, algorithm)
    return [[weight * value for value in row] for weight, row in zip(weights, rows, strict=True)]


def sample_weights(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[float]:
    """ROLL's weights by difficulty and length, with mean 1 over the samples that have a score."""
    if algorithm.difficulty_weight is None and algorithm.length_weight is None:
        return [1.0] * len(samples)
    lengths = [int((sample["response_mask"] > 0).sum()) for sample in samples]
    scored = [length for sample, length in zip(samples, lengths, strict=True) if sample["valid"]]
    groups = by_group_of(samples)
    weights = list[float]()
    for sample, length in zip(samples, lengths, strict=True):
        weight = 1.0
        if algorithm.difficulty_weight is not None:
            easiest, hardest = algorithm.difficulty_weight
            weight *= easiest + (hardest - easiest) * (
                1.0 - share_right(groups[int(sample["group_index"])])
            )
        if algorithm.length_weight is not None:
            shortest, longest = algorithm.length_weight
            span = max(scored, default=0) - min(scored, default=0)
            weight *= shortest + (longest - shortest) * (
                (length - min(scored)) / span if span > 0 else 0.0
            )
        weights.append(weight if sample["valid"] else 0.0)
    total = math.fsum(weights)
    return [weight * len(scored) / total for weight in weights] if total > 0 else weights


def share_right(group: Sequence[Sample]) -> float:
    """Mean accuracy of the samples of a group that have a score."""
    return mean([float(sample["acc"]) for sample in group if sample["valid"]])


def _pools(
    places: Sequence[tuple[int, int]],
    samples: Sequence[Sample],
    norm: NormConfig,
    level: str | None,
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each value, the values that it is normalised with."""

    def key(place: tuple[int, int]) -> object:
        sample = samples[place[0]]
        run = int(sample["episode_index"]) // norm.group_size if norm.group_size else 0
        return (int(sample["group_index"]), run) if level == "group" else None

    by_key: dict[object, list[tuple[int, int]]] = {}
    for place in places:
        by_key.setdefault(key(place), []).append(place)
    return {place: by_key[key(place)] for place in places}


Values = Mapping[tuple[int, int], float]
Pools = Mapping[tuple[int, int], list[tuple[int, int]]]


def _is_one_sample(pool: Sequence[tuple[int, int]], level: str | None) -> bool:
    return level == "group" and len({row for row, _ in pool}) == 1


def _centred(values: Values, pools: Pools, norm: NormConfig, moments: Moments | None) -> Values:
    if norm.mean_level is None:
        return values
    if norm.mean_level == "running":
        assert moments is not None
        return {place: value - moments["mean"] for place, value in values.items()}
    once = {id(pool): pool for pool in pools.values()}
    middles = {key: mean([values[p] for p in pool]) for key, pool in once.items()}
    sums = {key: math.fsum(values[p] - middles[key] for p in pool) for key, pool in once.items()}
    equal = {
        key: len(pool) > 1 and len({values[p] for p in pool}) == 1 for key, pool in once.items()
    }
    found = {}
    for place, value in values.items():
        pool = pools[place]
        total = sums[id(pool)]
        count = len(pool)
        near = value - middles[id(pool)]
        middle = total / count
        if norm.mean_leave1out:
            middle = (total - near) / (count - 1) if count > 1 else -middles[id(pool)]
            middle = near if _is_one_sample(pool, norm.mean_level) else middle
        found[place] = 0.0 if equal[id(pool)] else near - middle
    return found


def _scaled(values: Values, pools: Pools, norm: NormConfig, moments: Moments | None) -> Values:
    if norm.std_level is None:
        return values
    if norm.std_level == "running":
        assert moments is not None
        freedom = moments["count"] - norm.std_unbiased
        deviation = math.sqrt(moments["squares"] / freedom) if freedom > 0 else 1.0
        return {place: value / (deviation + norm.eps) for place, value in values.items()}
    deviations = {}
    for pool in {id(pool): pool for pool in pools.values()}.values():
        freedom = len(pool) - norm.std_unbiased
        undefined = freedom < 1 or (norm.std_unbiased and _is_one_sample(pool, norm.std_level))
        deviations[id(pool)] = (
            1.0 if undefined else math.sqrt(math.fsum(values[p] ** 2 for p in pool) / freedom)
        )
    return {
        place: value / (deviations[id(pools[place])] + norm.eps) for place, value in values.items()
    }
