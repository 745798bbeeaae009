"""The scheduler in simulated runs: by hand where the times are small numbers, and its invariants
under random delays and failures."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_run import Costs, Setup, lognormal, simulate
from distflow.planning.lengths import Lengths
from distflow.scheduling.data_plan import DataPlan, Frequency
from distflow.scheduling.ledger import Ledger, timeline

FIXED = Lengths(0.0, (10.0,), 10)


def plan(steps: int, batch: int, size: int = 1, **more: object) -> DataPlan:
    return DataPlan(1000, batch, size, None, steps, **more)  # type: ignore[arg-type]


def costs(decode: float = 0.1, train: float = 5.0, **more: object) -> Costs:
    """A token takes `decode`, whatever runs beside it; a step takes `train`."""
    return Costs(lambda running, context: decode, lambda tokens: 0.0, lambda tokens: train, **more)  # type: ignore[arg-type]


def test_with_staleness_generation_runs_beside_training():
    """A batch of 2 takes 1 s on an engine that has two slots; training takes 5 s. At staleness 1
    the queue is full when training asks, so only the first step waits; its groups and those of the
    next have version 0."""
    found = simulate(Setup(plan(4, 2, max_staleness=1), costs(), FIXED, slots=2))
    assert found.step_ends == pytest.approx([6, 11, 16, 21])
    assert found.staleness == {0: 2, 1: 6}
    assert found.training_idle == pytest.approx({"rollout": 1 / 21})
    assert found.rollout_idle["the staleness bound"] == pytest.approx((21 - 2 - 1 - 1) / 21)


def test_the_longest_response_ends_the_wave_and_decoding_slows_with_the_load():
    """Responses of 10 and 20 tokens; a token takes 0.1 s times the number that run: 10 · 0.2, then
    10 · 0.1."""
    slower = Costs(lambda running, context: 0.1 * running, lambda tokens: 0.0, lambda tokens: 1.0)
    lengths = Lengths(0.0, (10.0, 20.0), 20)
    drawn = [round(Random(group << 8).choice(lengths.responses)) for group in range(12)]
    step = (
        next(place for place in range(0, 12, 2) if {drawn[place], drawn[place + 1]} == {10, 20})
        // 2
    )
    found = simulate(Setup(plan(step + 1, 2), slower, lengths, slots=2))
    before = found.step_ends[step - 1] if step else 0.0
    assert found.step_ends[step] - before == pytest.approx(10 * 0.2 + 10 * 0.1 + 1.0)


SETUPS = st.builds(
    lambda batch, size, eta, engines, slots, every, shared, seed, over: Setup(
        plan(
            8,
            batch,
            size,
            max_staleness=eta,
            saves=Frequency(3),
            oversampling=Fraction(0 if eta else over, 2),
        ),
        costs(
            0.05,
            3.0,
            sync=0.5,
            save=1.0,
            restart=4.0,
            reward=lambda r: r.expovariate(1),
            tool=lambda r: r.random(),
        ),
        Lengths(5.0, lognormal(20.0, 1.0, 60), 60),
        engines=engines,
        slots=slots,
        shared=shared,
        sync_every=min(every, eta + 1),
        reward_workers=2,
        filtered=0.2,
        seed=seed,
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 1000),
    st.integers(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(SETUPS, st.booleans())
def test_staleness_is_bounded_and_groups_are_conserved(setup, fails):
    if fails:
        setup = replace(setup, engine_mtbf=60.0, training_mtbf=90.0)
    found = simulate(setup)
    assert len(found.step_ends) == 8 and all(a < b for a, b in pairwise(found.step_ends))
    assert max(found.staleness) <= setup.plan.max_staleness and min(found.staleness) >= 0
    assert sum(found.staleness.values()) == 8 * setup.plan.consumer_batch
    assert (
        0 <= sum(found.rollout_idle.values()) <= 1 + 1e-9
        and 0 <= sum(found.training_idle.values()) <= 1 + 1e-9
    )
    assert 0 < found.slots_used <= 1 + 1e-9
    assert simulate(setup) == found
    if not fails:
        assert found.num_restarts == found.num_engine_failures == found.num_redone == 0


def test_the_ledger_of_a_simulated_run_is_that_of_a_run(tmp_path):
    """`Ledger` refuses impossible moves, and its counts are compared with the coordinator's in each
    step."""
    setup = Setup(
        plan(6, 4, 2, max_staleness=2),
        costs(reward=lambda r: r.expovariate(1)),
        FIXED,
        filtered=0.3,
    )
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        found = simulate(setup, ledger)
    records = [record for _, record in timeline(tmp_path / "ledger.jsonl")]
    assert Counter(record["kind"] for record in records)["consumed"] == 6
    ages = Counter(
        step["step"] - 1 - record["version"]
        for step in records
        if step["kind"] == "consumed"
        for record in records
        if record["kind"] == "complete" and record["group_id"] in step["group_ids"]
    )
    assert ages == Counter(found.staleness)
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])["kind"] == "opened"
