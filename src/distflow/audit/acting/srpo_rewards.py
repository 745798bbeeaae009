"""A check of SRPO's rewards, by a second implementation of its formula. Only runs that use it import it."""

import math
from collections.abc import Sequence

from distflow.audit.recorded_step import RecordedStep, Sample, Wrong

_LIMIT = 1e-5


def check_srpo(recorded: RecordedStep) -> None:
    """The rewards of the step's episodes, in float64, by loops over pairs. Raises Wrong."""
    samples = [sample for sample in recorded.samples if sample["valid"]]
    srpo = recorded.config.srpo
    for task in {_task(sample) for sample in samples}:
        own = [sample for sample in samples if _task(sample) == task]
        won = [each["embeddings"] for each in own if bool(each["success"])]
        lost = [each for each in own if not bool(each["success"])]
        centres = _centres(won, srpo.eps, srpo.min_samples)
        gaps = [min((math.dist(each["embeddings"], centre) for centre in centres), default=0.0) for each in lost]
        span = max(gaps, default=0.0) - min(gaps, default=0.0)
        wanted = {str(each["uid"]): 1.0 for each in own if bool(each["success"])}
        for each, gap in zip(lost, gaps, strict=True):
            place = 0.5 if span < 1e-6 else (gap - min(gaps)) / span
            wanted[str(each["uid"])] = srpo.max / (1 + math.exp(-srpo.steepness * (0.5 - place))) if won else 0.0
        for each in own:
            reward, total = srpo.reward_coef * wanted[str(each["uid"])], math.fsum(each["token_level_rewards"].tolist())
            if not abs(reward - total) <= _LIMIT * max(1.0, abs(reward)):
                raise Wrong(f"SRPO gives sample {each['uid']} the reward {reward:.6g}, but it has {total:.6g}")


def _task(sample: Sample) -> tuple[str, str]:
    return str(sample["domain"]), str(sample["reward_extra"].get("instruction", ""))


def _centres(won: Sequence[Sequence[float]], eps: float, min_samples: int) -> list[list[float]]:
    """The mean of each cluster of core points and their neighbours; of all points if there is no core point."""
    if not won:
        return []
    columns = list(zip(*won, strict=True))
    means = [math.fsum(column) / len(won) for column in columns]
    spreads = [math.sqrt(math.fsum((x - m) ** 2 for x in c) / len(won)) for c, m in zip(columns, means, strict=True)]
    scaled = [[x / (s if s > 1e-15 * 10 else 1.0) for x, s in zip(each, spreads, strict=True)] for each in won]
    near = [[j for j, other in enumerate(scaled) if math.dist(each, other) <= eps] for each in scaled]
    cores = [i for i, own in enumerate(near) if len(own) >= min_samples]
    cluster = {core: core for core in cores}  # by its first core point
    for _ in cores:
        for core in cores:
            cluster[core] = min(cluster[other] for other in near[core] if other in cluster)
    members: dict[int, list[int]] = {}
    for point, own in enumerate(near):
        names = [cluster[point]] if point in cluster else [cluster[other] for other in own if other in cluster]
        if names:
            members.setdefault(min(names), []).append(point)
    groups = [*members.values()] or [list(range(len(won)))]
    return [[math.fsum(won[i][k] for i in group) / len(group) for k in range(len(won[0]))] for group in groups]
