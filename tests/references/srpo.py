"""SRPO's rewards by loops over pairs of points."""

import math
from collections.abc import Sequence

Point = Sequence[float]


def scaled(points: Sequence[Point]) -> list[list[float]]:
    """Each dimension with variance 1; one without variance is 0."""
    found = [[0.0] * len(points[0]) for _ in points]
    for dimension in range(len(points[0])):
        column = [point[dimension] for point in points]
        middle = math.fsum(column) / len(column)
        variance = math.fsum((value - middle) ** 2 for value in column) / len(column)
        spread = math.sqrt(variance)
        for number, value in enumerate(column):
            found[number][dimension] = (value - middle) / (spread if spread > 2e-15 else 1.0)

    return found


def clusters(points: Sequence[Point], eps: float, min_samples: int) -> list[set[int]]:
    """DBSCAN (Ester et al. 1996): chains of core points, in the order of their first one, with the
    points that border them; a point that borders several is in the first."""
    near = []
    for own in points:
        near.append({other for other, point in enumerate(points) if math.dist(own, point) <= eps})
    cores = [point for point, neighbours in enumerate(near) if len(neighbours) >= min_samples]

    name = {core: core for core in cores}
    for _ in cores:
        for core in cores:
            for other in cores:
                if other in near[core]:
                    name[core] = min(name[core], name[other])

    found = [{core for core in cores if name[core] == first} for first in sorted({*name.values()})]
    chains = [set(chain) for chain in found]

    for point in range(len(points)):
        if point in name:
            continue
        for chain, own in zip(chains, found, strict=True):
            if chain & near[point]:
                own.add(point)
                break

    return found


def centres(points: Sequence[Point], eps: float, min_samples: int) -> tuple[list[list[float]], int]:
    """(the mean of each cluster, how many there are); the mean of all points if there is none."""
    found = clusters(scaled(points), eps, min_samples)
    groups = found or [set(range(len(points)))]

    means = []
    for group in groups:
        mean = []
        for dimension in range(len(points[0])):
            mean.append(math.fsum(points[number][dimension] for number in group) / len(group))
        means.append(mean)

    return means, len(found)


def rewards(
    won: Sequence[Point],
    lost: Sequence[Point],
    eps: float = 0.5,
    min_samples: int = 2,
    largest: float = 0.6,
    steepness: float = 10.0,
) -> tuple[list[float], list[float], int]:
    """(reward of each failure of a task, its distance from 0 to 1, clusters of its successes)."""
    if not won:
        return [0.0] * len(lost), [-1.0] * len(lost), 0

    means, number = centres(won, eps, min_samples)
    gaps = [min(math.dist(own, centre) for centre in means) for own in lost]

    found = []
    places = []
    for gap in gaps:
        span = max(gaps) - min(gaps)
        place = 0.5 if span < 1e-6 else (gap - min(gaps)) / span
        places.append(place)
        found.append(largest / (1.0 + math.exp(-steepness * (0.5 - place))))

    return found, places, number
