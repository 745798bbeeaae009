"""The bound on staleness over thousands of random runs with stragglers, drops and weights that
arrive late; and rules for forming a step that look as good, and break it."""

import heapq
import random

import pytest

from distflow.scheduling.admission import rollout_capacity
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.group_states import CountsError, PromptGroup
from distflow.scheduling.ledger import Ledger
from tests.ledger_audit import verify

NUM_RUNS = 1500


class OtherRule:
    """Admission as the coordinator's, steps by another rule. choose: (complete groups by when they
    completed, step, plan) → those of the step."""

    def __init__(self, plan, choose):
        self.plan = plan
        self.choose = choose
        self.step = self.issued = 0
        self.running = {}
        self.complete_ones = []

    @property
    def finished(self):
        return self.step == self.plan.total_steps

    def issue_groups(self, engine_version):
        accepted = self.step * self.plan.consumer_batch + len(self.complete_ones)
        bounded = min(engine_version, self.plan.total_steps - 1 - self.plan.max_staleness)
        staleness = self.plan.max_staleness
        batch = self.plan.consumer_batch
        num_new = rollout_capacity(
            (staleness + 1) * batch, len(self.running), staleness, bounded, batch, accepted
        )
        group_ids = [
            PromptGroup(number, 0, 0, 1, engine_version)
            for number in range(self.issued, self.issued + num_new)
        ]
        self.running |= {group_id.group_id: group_id for group_id in group_ids}
        self.issued += num_new
        return group_ids

    def complete(self, number, num_tokens):
        self.complete_ones.append(self.running.pop(number))

    def drop(self, number, reason):
        del self.running[number]

    def ready(self, step):
        if len(self.complete_ones) < self.plan.consumer_batch:
            return None
        return tuple(
            group_id.group_id for group_id in self.choose(self.complete_ones, step, self.plan)
        )

    def release(self, step):
        numbers = set(self.ready(step))
        self.complete_ones = [
            group_id for group_id in self.complete_ones if group_id.group_id not in numbers
        ]
        self.step += 1


def as_they_complete(complete, step, plan):
    return complete[: plan.consumer_batch]


def due_then_oldest(complete, step, plan):
    """What is due now, then the oldest of what is complete, with no thought of what it leaves
    behind."""
    return sorted(complete, key=lambda t: (t.version + plan.max_staleness > step, t.group_id))[
        : plan.consumer_batch
    ]


def staleness_of(seed, make):
    """(the highest staleness of a run in simulated time, the bound). A run that is stuck raises."""
    rng = random.Random(seed)
    plan = DataPlan(
        num_rows=10_000,
        consumer_batch=rng.randint(1, 6),
        group_size=1,
        total_groups=None,
        total_steps=rng.randint(4, 20),
        shuffle=False,
        max_staleness=rng.randint(1, 4),
    )
    drops = rng.choice([0, 0.3])
    straggles = rng.choice([0.02, 0.2])
    training = rng.choice([0.1, 1, 3])
    transfer = rng.choice([0, 0.5, 5])
    run = make(plan)
    engine_version = 0
    now = 0.0
    highest = 0
    trains = False
    versions = {}
    events = []

    def after(delay, kind, value):
        heapq.heappush(events, (now + delay, len(versions), kind, value))

    while not run.finished:
        for group_id in run.issue_groups(engine_version):
            versions[group_id.group_id] = group_id.version
            after(
                rng.uniform(5, 50) if rng.random() < straggles else rng.random(),
                "ended",
                group_id.group_id,
            )
        if not trains and (numbers := run.ready(run.step)) is not None:
            highest = max(highest, *(run.step - versions[number] for number in numbers))
            trains = True
            after(training, "trained", run.step)
        assert events, "the run is stuck"
        now, _, kind, value = heapq.heappop(events)
        if kind == "trained":
            run.release(value)
            trains = False
            after(transfer, "arrived", value + 1)
        elif kind == "arrived":
            engine_version = value
        elif rng.random() < drops:
            run.drop(value, "equal_rewards")
        else:
            run.complete(value, 1)
    return highest, plan.max_staleness


@pytest.mark.slow
def test_no_run_is_stuck_and_no_group_staler_than_allowed():
    at_the_bound = 0
    for seed in range(NUM_RUNS):
        highest, bound = staleness_of(seed, Coordinator)
        assert highest <= bound, f"run {seed}"
        at_the_bound += highest == bound
    assert at_the_bound > NUM_RUNS / 4, "the bound is used, not only kept"


@pytest.mark.parametrize("choose", [as_they_complete, due_then_oldest])
def test_a_simpler_rule_would_break_the_bound(choose):
    """So the runs above are hard enough to tell."""
    broken = 0
    for seed in range(NUM_RUNS // 5):
        highest, bound = staleness_of(seed, lambda plan: OtherRule(plan, choose))
        broken += highest > bound
    assert broken > NUM_RUNS / 5 / 10


ROWS = 12


def steps_in_order(order, dropped, options):
    """A synchronous run whose groups of a wave end in the order of their keys."""
    plan = DataPlan(ROWS, 3, 1, total_groups=2 * ROWS, total_steps=2 * ROWS // 3, **options)
    run = Coordinator(plan)
    steps = []
    while not run.finished:
        group_ids = run.issue_groups()
        for group_id in sorted(group_ids, key=lambda group_id: order[group_id.group_id]):
            if group_id.group_id in dropped:
                run.drop(group_id.group_id, "equal_rewards")
            else:
                run.complete(group_id.group_id, 1)
        if (numbers := run.ready(run.step)) is not None:
            steps.append(numbers)
            run.release(run.step)
        elif not group_ids and not run.finished:
            raise AssertionError("the run is stuck")
    return steps


@pytest.mark.parametrize(
    "options", [{}, {"max_concurrent": 2}, {"max_num_gen_batches": 3, "when_exhausted": "continue"}]
)
def test_at_staleness_0_a_step_does_not_depend_on_the_order_of_completion(options):
    rng = random.Random(0)
    for _ in range(30):
        dropped = {number for number in range(2 * ROWS) if rng.random() < 0.3}
        orders = [rng.sample(range(2 * ROWS), 2 * ROWS) for _ in range(4)]
        first, *others = [steps_in_order(order, dropped, options) for order in orders]
        assert others == [first] * 3
        survivors = [number for number in range(2 * ROWS) if number not in dropped]
        if "when_exhausted" not in options:
            assert first == [tuple(survivors[i : i + 3]) for i in range(0, len(survivors), 3)]


def journal_of(path, *records):
    ledger = Ledger(path)
    for kind, fields in records:
        ledger.append(kind, **fields)
    ledger.close()
    return path


def issued(number, version, attempt=0):
    return "issued", {
        "group_id": number,
        "epoch": 0,
        "row": number,
        "version": version,
        "attempt": attempt,
    }


def completed(number, **version):
    return "complete", {"group_id": number, "tokens": 1, **version}


def step_of(step, *group_ids, weights=None):
    weights = step if weights is None else weights
    return [
        ("consumed", {"step": step, "group_ids": list(group_ids), "tokens": len(group_ids)}),
        ("version", {"step": step, "weights": weights}),
    ]


def plan_record(max_staleness):
    return "plan", {"max_staleness": max_staleness, "consumer_batch": 1}


STALE = [issued(0, 0), *step_of(1), *step_of(2), completed(0, version=0), *step_of(3, 0)]
"""A group of version 0 in step 3."""


def test_the_audit_of_a_journal_holds_each_group_to_the_plan_in_force(tmp_path):
    verify(journal_of(tmp_path / "fits", plan_record(2), *STALE))
    for name, records in {
        "too stale": [plan_record(1), *STALE],
        "a plan that was changed": [plan_record(2), *STALE[:3], plan_record(1), *STALE[3:]],
        "by its group": [plan_record(1), *STALE[:5], completed(0), *STALE[6:]],
    }.items():
        with pytest.raises(CountsError, match="step 3.*group 0.*version 0.*max_staleness was 1"):
            verify(journal_of(tmp_path / name, *records))


def test_a_token_that_is_older_than_the_ticket_counts(tmp_path):
    records = [
        plan_record(1),
        *step_of(1),
        *step_of(2),
        issued(0, 2),
        completed(0, version=0),
        *step_of(3, 0),
    ]
    with pytest.raises(CountsError, match="group 0.*version 0"):
        verify(journal_of(tmp_path / "lagging", *records))
    with pytest.raises(CountsError, match="group 0.*version 3"):
        ahead = [*records[:-3], completed(0, version=3), *step_of(3, 0)]
        verify(journal_of(tmp_path / "ahead", *ahead))


def test_a_journal_of_before_has_no_bound(tmp_path):
    verify(journal_of(tmp_path / "old", *STALE))


def test_versions_that_go_backwards_are_found(tmp_path):
    backwards = [*step_of(1), issued(0, 1), *step_of(2), issued(1, 0)]
    with pytest.raises(CountsError, match="group 1.*version 0.* 1 "):
        verify(journal_of(tmp_path / "engine_version", *backwards))
    with pytest.raises(CountsError, match="group 0.*version 2.*step 1"):
        verify(journal_of(tmp_path / "ahead", *step_of(1), issued(0, 2)))
    with pytest.raises(CountsError, match="version 2.*step 0 .*step 1"):
        verify(journal_of(tmp_path / "weights", *step_of(1), *step_of(2, weights=0)))
    with pytest.raises(CountsError, match="version 5 .* but step 1 ended"):
        verify(
            journal_of(
                tmp_path / "skipped", *step_of(1)[:1], ("version", {"step": 5, "weights": 5})
            )
        )


def test_versions_may_begin_anew_where_a_run_goes_on(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    start = ledger.mark()
    for kind, fields in [*step_of(1), issued(0, 1)]:
        ledger.append(kind, **fields)
    ledger.close()
    ledger = Ledger(path, start)
    for kind, fields in [issued(0, 0), completed(0, version=0), *step_of(1, 0)]:
        ledger.append(kind, **fields)
    ledger.close()
    verify(path)
