"""Domains in a coordinator: shares from the ledger alone, in runs that drop groups, lose them,
crash and resume."""

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import UserError
from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan, DomainPlan, epoch_order
from distflow.scheduling.group_states import CountsError
from distflow.scheduling.ledger import Ledger, timeline
from distflow.scheduling.sample_queue import Exhausted
from tests.ledger_audit import verify
from tests.ledger_counts import counted


class Journal(Ledger):
    """Whose disk nobody waits for."""

    def sync(self):
        pass


def plan_of(*domains, batch=4, steps=12, **changes):
    domains = tuple(DomainPlan(*domain) for domain in domains)
    plan = DataPlan(sum(d.num_rows for d in domains), batch, 2, None, steps, domains=domains)
    return replace(plan, **changes)


def shares_of(path):
    """By step, how many groups each domain has had: counted from `issued` and `consumed` alone."""
    domains = {}
    counts = Counter()
    steps = []
    for _, record in timeline(path):
        if record["kind"] == "issued":
            domains[record["group_id"]] = record["domain"]

        if record["kind"] == "inherited":
            domains |= {group["group_id"]: group["domain"] for group in record.get("live", ())}
            counts = Counter(
                {name: each["consumed"] for name, each in record.get("domains", {}).items()}
            )

        if record["kind"] == "consumed":
            counts.update(domains[prompt_group] for prompt_group in record["group_ids"])
            steps.append(dict(counts))

    return steps


def check_shares(plan, path, num_missing=0):
    total = sum(Fraction(str(domain.weight)) for domain in plan.domains)
    for counts in shares_of(path):
        consumed = sum(counts.values())
        for domain in plan.domains:
            exact = Fraction(str(domain.weight)) / total * consumed
            assert abs(counts.get(domain.name, 0) - exact) < 1 + num_missing, counts


class Walk:
    """A run in random moves. A domain's groups are dropped by its chance; a step is trained on when
    it is ready."""

    def __init__(self, plan, folder, seed, chances):
        self.plan = plan
        self.folder = folder
        self.chances = chances
        self.choice = random.Random(seed)
        self.num_crashes = 0
        self.ledger = Journal(folder / "ledger-0.jsonl")
        self.cut = None
        self.begin()

    def begin(self):
        snapshot = json.loads(self.cut) if self.cut else None
        self.coordinator = Coordinator(self.plan, self.ledger, snapshot)
        self.running = set()
        self.sent = self.engine_version = self.coordinator.step
        self.cut = json.dumps(self.coordinator.snapshot())

    def take(self):
        for prompt_group in self.coordinator.issue_groups(self.engine_version):
            assert prompt_group.group_id not in self.running
            self.running.add(prompt_group.group_id)
            self.domain_of(prompt_group)

    def domain_of(self, prompt_group):
        """The domain of a group's row, which must be the one that its stream names."""
        first = 0
        for domain in self.plan.domains:
            if first <= prompt_group.row < first + domain.num_rows:
                assert prompt_group.stream == f"train/{domain.name}"
                order = epoch_order(
                    domain.num_rows,
                    self.plan.seed,
                    prompt_group.epoch,
                    self.plan.shuffle,
                    domain.name,
                )
                assert order[prompt_group.position % domain.num_rows] == prompt_group.row - first
                assert prompt_group.epoch == prompt_group.position // domain.num_rows
                self.domains = {**getattr(self, "domains", {}), prompt_group.group_id: domain.name}

            first += domain.num_rows

    def end(self, number, mishaps=True):
        self.running.discard(number)
        if mishaps and self.choice.random() < 0.1:
            self.coordinator.retry(number)
        elif self.choice.random() < self.chances[self.domains[number]]:
            self.coordinator.drop(number, "all_equal")
        else:
            self.coordinator.complete(number, 3)
            if mishaps and self.choice.random() < 0.05:
                self.coordinator.lose(number)

    def train(self):
        step = self.coordinator.step
        if self.coordinator.finished or self.coordinator.ready(step) is None:
            return
        if self.choice.random() < 0.1:
            self.coordinator.queue.untake()
            return

        held = self.choice.random() < 0.3 and step + 1 - self.sent <= self.plan.max_staleness
        self.engine_version = self.engine_version if held else step + 1
        self.sent = self.sent if held else step + 1
        self.coordinator.release(step, sent_weights=not held)
        self.cut = json.dumps(self.coordinator.snapshot())

    def crash(self):
        self.ledger.close()
        elsewhere = self.choice.random() < 0.3
        self.num_crashes += elsewhere
        self.ledger = Journal(
            self.folder / f"ledger-{self.num_crashes}.jsonl", mark_of(json.loads(self.cut))
        )

        if self.choice.random() < 0.3:
            changes = {
                "max_staleness": self.choice.randint(0, 3),
                "consumer_batch": self.choice.randint(1, 7),
            }
            self.plan = replace(self.plan, **changes)

        self.begin()

    def move(self):
        chance = self.choice.random()
        if chance < 0.25:
            self.take()
        elif chance < 0.5:
            self.train()
        elif chance < 0.53:
            self.crash()
        elif self.running:
            self.end(self.choice.choice(sorted(self.running)))

        group_counts = self.coordinator.checked_counts()
        group_counts.check()
        assert group_counts == counted(self.ledger.path)

    def finish(self):
        """Once nothing goes wrong any more, every step comes, in as many rounds as dropping may
        take."""
        for _ in range(20_000):
            if self.coordinator.finished:
                break

            self.take()
            for number in sorted(self.running):
                self.end(number, mishaps=False)
            self.engine_version = max(self.engine_version, self.sent)
            self.train()

        assert self.coordinator.finished, "a step waits for ever"
        self.ledger.close()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([1, 2, 3, 0.1, 0.25, 7.5, 40]), min_size=4, max_size=4),
    drops=st.lists(st.sampled_from([0, 0.5, 0.8]), min_size=4, max_size=4),
    batch=st.integers(1, 8),
    staleness=st.integers(0, 3),
    max_concurrent=st.none() | st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_shares_hold_whatever_happens(
    tmp_path_factory, sizes, weights, drops, batch, staleness, max_concurrent, seed
):
    names = "abcd"[: len(sizes)]
    plan = plan_of(
        *zip(names, sizes, weights, strict=False),
        batch=batch, max_staleness=staleness, max_concurrent=max_concurrent,
    )  # fmt: skip
    walk = Walk(plan, tmp_path_factory.mktemp("walk"), seed, dict(zip(names, drops, strict=False)))
    for _ in range(150):
        walk.move()
    walk.finish()

    for path in sorted(walk.folder.iterdir()):
        verify(path)
        check_shares(plan, path)


def complete_all(coordinator, drop=lambda prompt_group: False):
    """A step of a run without staleness, from its groups to its release; those that were issued, in
    order."""
    issued = []
    step = coordinator.step
    while coordinator.ready(step) is None:
        prompt_groups = coordinator.issue_groups(step)
        assert prompt_groups
        issued += prompt_groups

        for prompt_group in prompt_groups:
            coordinator.drop(prompt_group.group_id, "all_equal") if drop(
                prompt_group
            ) else coordinator.complete(prompt_group.group_id, 1)

    coordinator.release(step)
    return issued


def test_a_run_that_goes_on_issues_what_the_other_would_have(tmp_path):
    plan = plan_of(("a", 4, 2), ("b", 7, 1.5), ("c", 2, 0.3), batch=5, steps=9)

    def rows(coordinator, num_steps):
        found = [
            complete_all(coordinator, lambda prompt_group: prompt_group.row % 3 == 0)
            for _ in range(num_steps)
        ]
        return [
            (prompt_group.group_id, prompt_group.stream, prompt_group.epoch, prompt_group.row)
            for step in found
            for prompt_group in step
        ]

    whole = rows(Coordinator(plan), 9)
    first = Coordinator(plan)
    before = rows(first, 4)
    second = Coordinator(plan, None, json.loads(json.dumps(first.snapshot())))
    assert before + rows(second, 5) == whole


def test_a_step_waits_for_the_slow_domain_at_any_staleness():
    """What is quick does not take the places of what is slow."""
    coordinator = Coordinator(
        plan_of(("quick", 9, 1), ("slow", 9, 1), batch=2, max_staleness=2, steps=5)
    )
    prompt_groups = coordinator.issue_groups(0)
    assert Counter(prompt_group.stream for prompt_group in prompt_groups) == {
        "train/quick": 3,
        "train/slow": 3,
    }

    for prompt_group in prompt_groups:
        if prompt_group.stream == "train/quick":
            coordinator.complete(prompt_group.group_id, 1)

    assert coordinator.ready(0) is None and not coordinator.issue_groups(0)
    slow = [prompt_group for prompt_group in prompt_groups if prompt_group.stream == "train/slow"]
    coordinator.complete(slow[0].group_id, 1)
    assert len(coordinator.ready(0)) == 2


def test_draws_are_counted_by_domain():
    """A domain that drops all of its groups uses up its own draws, and is named."""
    plan = plan_of(("good", 9, 3), ("bad", 9, 1), batch=4, steps=5, max_num_gen_batches=3)
    coordinator = Coordinator(plan)

    issued = Counter()
    with pytest.raises(Exhausted, match="step 1.*'bad'.*3 drawn"):
        while coordinator.ready(0) is None:
            for prompt_group in coordinator.issue_groups(0):
                issued[prompt_group.stream] += 1
                if prompt_group.stream == "train/bad":
                    coordinator.drop(prompt_group.group_id, "all_equal")
                else:
                    coordinator.complete(prompt_group.group_id, 1)

    assert issued == {"train/good": 3, "train/bad": 3}


def test_a_short_step_takes_what_there_is_and_no_other_domain_fills_it(tmp_path):
    plan = plan_of(
        ("good", 9, 3),
        ("bad", 9, 1),
        batch=4,
        steps=2,
        max_num_gen_batches=2,
        when_exhausted="continue",
    )

    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        coordinator = Coordinator(plan, ledger)
        for _ in range(2):
            complete_all(coordinator, lambda prompt_group: prompt_group.stream == "train/bad")
        assert coordinator.finished

    assert shares_of(tmp_path / "ledger.jsonl") == [{"good": 3}, {"good": 6}]
    verify(tmp_path / "ledger.jsonl")


def test_a_step_waits_for_a_lost_group_also_where_another_domain_is_exhausted():
    plan = plan_of(
        ("a", 9, 1), ("b", 9, 1), batch=2, max_num_gen_batches=1, when_exhausted="continue"
    )
    coordinator = Coordinator(plan)
    coordinator.issue_groups()
    coordinator.retry(0)
    coordinator.drop(1, "all_equal")
    assert coordinator.ready(0) is None
    (again,) = coordinator.issue_groups()
    coordinator.complete(again.group_id, 1)
    coordinator.issue_groups()
    assert coordinator.ready(0) == (0,)


def test_memory_that_is_full_holds_what_the_next_step_needs_of_each_domain():
    plan = plan_of(("a", 9, 1), ("b", 9, 1), batch=2, steps=5, max_staleness=3, max_held_bytes=1)
    coordinator = Coordinator(plan)
    prompt_groups = coordinator.issue_groups(0)
    assert [prompt_group.stream for prompt_group in prompt_groups] == ["train/a", "train/b"]
    coordinator.complete(prompt_groups[0].group_id, 1)
    coordinator.weigh(prompt_groups[0].group_id, 100)
    coordinator.drop(prompt_groups[1].group_id, "all_equal")
    assert [prompt_group.stream for prompt_group in coordinator.issue_groups(0)] == ["train/b"]


def test_orders_differ_by_domain_and_do_not_depend_on_the_others():
    assert epoch_order(9, 1, 0, True, "a").tolist() != epoch_order(9, 1, 0, True, "b").tolist()
    assert epoch_order(9, 1, 0, True).tolist() != epoch_order(9, 1, 0, True, "a").tolist()

    def rows_of_a(*domains):
        first = sum(rows for name, rows, _ in domains[: [name for name, *_ in domains].index("a")])
        coordinator = Coordinator(plan_of(*domains, batch=6, steps=4))
        issued = [
            prompt_group
            for _ in range(4)
            for prompt_group in complete_all(coordinator)
            if prompt_group.stream == "train/a"
        ]

        return [(prompt_group.epoch, prompt_group.row - first) for prompt_group in issued][:8]

    assert rows_of_a(("a", 5, 1), ("b", 3, 1)) == rows_of_a(("c", 4, 1), ("a", 5, 1), ("d", 2, 1))


@pytest.mark.parametrize(
    "other", [[("a", 4, 1), ("c", 4, 1)], [("a", 5, 1), ("b", 3, 1)], [("b", 4, 1), ("a", 4, 1)]]
)
def test_a_run_of_other_domains_is_refused(other):
    snapshot = Coordinator(plan_of(("a", 4, 1), ("b", 4, 1))).snapshot()
    with pytest.raises(
        UserError,
        match=r"domains=a \(4 rows\), b \(4 rows\), .*data\.domains",
    ):
        Coordinator(plan_of(*other), None, snapshot)

    with pytest.raises(UserError, match="domains=.* has none"):
        Coordinator(DataPlan(8, 4, 2, 8, 2), None, snapshot)


def test_a_journal_that_gives_a_domain_too_much_is_found_out(tmp_path):
    plan = plan_of(("a", 9, 1), ("b", 9, 1), batch=4, steps=3)
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        coordinator = Coordinator(plan, ledger)
        for _ in range(3):
            complete_all(coordinator)

    verify(path)
    text = path.read_text().replace('"domain":"b"', '"domain":"a"')
    path.write_text(text)
    with pytest.raises(CountsError, match="step 1.*0.500"):
        verify(path)


def test_weights_that_the_config_changes_are_found_in_order(tmp_path):
    """With many domains some are behind by more than a place where all changes at once."""
    plan = plan_of(*((name, 9, 1) for name in "abcdef"), batch=5, steps=8)
    with Journal(tmp_path / "ledger.jsonl") as ledger:
        coordinator = Coordinator(plan, ledger)
        complete_all(coordinator)
        snapshot = coordinator.snapshot()

    other = replace(
        plan, domains=tuple(replace(d, weight=1e-3 if d.name != "f" else 9) for d in plan.domains)
    )

    with Journal(tmp_path / "ledger.jsonl", mark_of(snapshot)) as ledger:
        coordinator = Coordinator(other, ledger, snapshot)
        complete_all(coordinator)

    verify(tmp_path / "ledger.jsonl")
