"""Quotas: each domain has its share after every place, whatever the weights, also where another
went on from there."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.domain_quotas import Quotas
from tests.ledger_audit import most_behind

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


CHANGES = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 2, 7, 1000]), min_size=6, max_size=6),
    min_size=1,
    max_size=20,
)


def shares_of(weights):
    weights = weights if any(weights) else [1] * len(weights)
    return [Fraction(weight, sum(weights)) for weight in weights]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    CHANGES, st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.sets(st.integers(0, 20))
)
def test_shares_that_change_are_made_up_for(changes, num_domains, batch, ahead, resumes):
    """What each domain had is within the bound of the sum of its shares, after every place. Changes
    come with a delay, and a run that goes on between takes the places that the other would have."""
    changes = [shares_of(weights[:num_domains]) for weights in changes]
    quotas = Quotas(batch, weights=changes[0])
    other = Quotas(batch, weights=changes[0])
    due = [Fraction(0)] * num_domains
    counts = [0] * num_domains
    in_force = {0: changes[0]}
    for step in range(len(changes) + ahead):
        in_force.setdefault(step, in_force[max(step - 1, 0)])
        assert [quotas.changes[0], *quotas.changes[1:]][0] == (step, in_force[step])
        for domain in domains_of(quotas, step, batch):
            counts[domain] += 1
            due = [have + share for have, share in zip(due, in_force[step], strict=True)]
            behind = [have - count for have, count in zip(due, counts, strict=True)]
            assert min(behind) > -1 and max(behind) <= most_behind(num_domains)
        assert domains_of(other, step, batch) == domains_of(quotas, step, batch)
        if step < len(changes):
            for each in (quotas, other):
                each.up_to(0, step + ahead)  # what may be asked for before the change is known
                each.change(step + 1 + ahead, changes[step])
            in_force[step + 1 + ahead] = changes[step]
        quotas.consume()
        other.consume()
        assert quotas.lags == behind
        if step in resumes:
            (_, now), *later = other.changes
            lags = other.lags
            other = Quotas(batch, step + 1, other.changes[0][1], other.lags)
            assert other.lags == lags
            for first, shares in later:
                other.change(first, shares)


def test_places_that_were_looked_at_ahead_are_given_out_anew():
    """Whoever asks for a place beyond the steps that are wanted, of a domain with a share or none,
    changes nothing."""
    shares = [[Fraction(1), Fraction(0)], [Fraction(1, 7), Fraction(6, 7)], [Fraction(1, 2)] * 2]
    asked, other = (Quotas(3, weights=[Fraction(2), Fraction(1)]) for _ in range(2))
    for step in range(30):
        assert [asked.place(domain, number) for domain in (0, 1) for number in (step % 4, 5)]
        assert domains_of(asked, step, 3) == domains_of(other, step, 3)
        for quotas in (asked, other):
            quotas.change(step + 1, shares[step % 3])
            quotas.consume()
        assert asked.lags == other.lags and asked.changes == other.changes
        again = Quotas(3, step + 1, other.changes[0][1], other.lags)
        for domain in (0, 1):
            assert [asked.place(domain, n) for n in range(4)] == [
                again.place(domain, n) for n in range(4)
            ]


def test_no_rule_could_keep_them_closer():
    """Whoever was served gets no share any more: the last is behind by all that the others were
    ahead."""
    for num_domains in range(2, 9):
        quotas = Quotas(1, weights=[Fraction(1)] * num_domains)
        left = set(range(num_domains))
        behind = 0
        for step in range(num_domains):
            quotas.change(
                step, [Fraction(domain in left, len(left)) for domain in range(num_domains)]
            )
            left -= set(domains_of(quotas, step, 1))
            quotas.consume()
            behind = max(behind, *quotas.lags)
        assert behind == most_behind(num_domains) - 1


def test_a_domain_without_a_share_waits_until_it_is_owed_a_place():
    quotas = Quotas(1, weights=[Fraction(2, 5), Fraction(3, 5)])
    assert domains_of(quotas, 0, 1) == [1]
    quotas.consume()
    assert quotas.lags == [Fraction(2, 5), Fraction(-2, 5)]
    quotas.change(1, [Fraction(0), Fraction(1)])
    for step in range(1, 9):
        assert domains_of(quotas, step, 1) == [1]
        quotas.consume()
    assert quotas.lags == [Fraction(2, 5), Fraction(-2, 5)]
