"""Quotas: each domain has its share after every place, whatever the weights, also where another
went on from there."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.domain_quotas import Quotas

WEIGHTS = st.lists(st.integers(1, 60) | st.sampled_from([1, 1000, 99991]), min_size=1, max_size=7)


def domains_of(quotas, step, batch):
    """The domain of each place of the next step, as its lists of places have it."""
    places = {}
    for domain in range(len(quotas.lags)):
        for number in range(quotas.up_to(domain, step)):
            places[quotas.place(domain, number)] = domain
    return [places[step * batch + place] for place in range(batch)]


def test_by_hand():
    """Two to one: the first has to have a place by the second, and then none before the third; the
    second one by it."""
    quotas = Quotas(6, weights=[Fraction(2), Fraction(1)])
    assert domains_of(quotas, 0, 6) == [0, 0, 1, 0, 0, 1]
    assert (quotas.up_to(0, 0), quotas.up_to(1, 0), quotas.up_to(0, 1), quotas.up_to(1, -1)) == (
        4,
        2,
        8,
        0,
    )


def test_one_source_has_every_place():
    quotas = Quotas(3, next_step=5)
    assert [quotas.up_to(0, step) for step in (4, 5, 7)] == [0, 3, 9]
    quotas.consume()
    assert [quotas.up_to(0, step) for step in (5, 6, 7)] == [0, 3, 6] and quotas.in_all(0, 7) == 9


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    weights=WEIGHTS,
    batch=st.integers(1, 9),
    resumes=st.sets(st.integers(0, 30)),
    other=st.integers(1, 9),
)
def test_every_prefix_is_exact(weights, batch, resumes, other):
    """Within less than a place of the share, after every place; a run that goes on, with a batch of
    another size, takes the very places that the first would have."""
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    quotas = Quotas(batch, weights=shares)
    counts = [0] * len(weights)

    size = batch
    places = []
    for step in range(30):
        if step in resumes:
            size = other
            quotas = Quotas(size, step, shares, quotas.lags)
        places += domains_of(quotas, step, size)
        quotas.consume()

    for number, domain in enumerate(places, 1):
        counts[domain] += 1
        assert all(
            abs(share * number - count) < 1 for share, count in zip(shares, counts, strict=True)
        )

    assert quotas.lags == [
        share * len(places) - count for share, count in zip(shares, counts, strict=True)
    ]
    whole = Quotas(len(places), weights=shares)
    assert domains_of(whole, 0, len(places)) == places


def test_weights_that_change_take_over_what_a_domain_is_behind():
    before = Quotas(5, weights=[Fraction(1), Fraction(3)])
    before.consume()
    after = Quotas(5, 1, [Fraction(2), Fraction(1)], before.lags)
    assert sum(after.lags) == 0 and after.lags == before.lags
    lags = before.lags
    shares = (Fraction(2, 3), Fraction(1, 3))

    for step in range(1, 20):
        taken = domains_of(after, step, 5)
        lags = [lag + 5 * shares[domain] - taken.count(domain) for domain, lag in enumerate(lags)]
        after.consume()
        assert after.lags == lags and all(abs(lag) < 1 for lag in lags)
