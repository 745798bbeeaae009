"""Lengths: as they are assumed, and as they follow another limit."""

from math import log
from random import Random

import pytest

from distflow.planning.lengths import Lengths, lengths_under, quantiles, spread_evenly


@pytest.mark.parametrize(
    ("mean", "end", "cut"), [(100, 200, 0.0), (256, 512, 0.0), (384, 512, 0.5)]
)
def test_responses_spread_around_their_mean(mean, end, cut):
    lengths = Lengths(10, spread_evenly(mean, 512), 512)
    assert lengths.response == pytest.approx(mean, rel=1e-3)
    assert lengths.end == pytest.approx(end, rel=1e-3)
    assert lengths.running(end * 0.999) == pytest.approx(cut, abs=2e-3)
    assert lengths.running(end / 2) == pytest.approx(cut + (1 - cut) / 2, abs=1e-3)
    assert lengths.running(end) == 0


def test_lengths_under_a_lower_limit_are_cut_and_under_a_higher_one_go_on_at_the_same_rate():
    random = Random(3)
    rate = 1 / 40
    full = [random.expovariate(rate) for _ in range(20_000)]
    seen = [min(30.0, length) for length in full]
    assert lengths_under(20, seen, 30) == tuple(sorted(min(20.0, length) for length in full))
    longer = lengths_under(200, seen, 30)
    wanted = sum(min(200.0, length) for length in full) / len(full)
    assert sum(longer) / len(longer) == pytest.approx(wanted, rel=0.03)
    assert longer[len(longer) // 2] == pytest.approx(log(2) / rate, rel=0.05)
    assert lengths_under(90, [30.0, 30.0], 30) == (90.0, 90.0), "nothing ever ended"


def test_quantiles_are_of_equal_shares():
    assert quantiles([3, 1, 2], 5) == (1, 2, 3) and quantiles(range(100), 4) == (12, 37, 62, 87)
