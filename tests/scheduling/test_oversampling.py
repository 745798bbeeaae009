"""More groups in flight than a step needs: what is left when it is full waits, and is handed out
again first."""

import json
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan, DomainPlan
from distflow.scheduling.group_states import MAX_ABORTS, CountsError, Places
from distflow.scheduling.ledger import Ledger, timeline
from distflow.scheduling.sample_queue import Exhausted
from tests.ledger_audit import verify


class Journal(Ledger):
    """Whose disk nobody waits for."""

    def sync(self):
        pass


def plan_of(batch=4, share="1/2", **changes):
    plan = {"num_rows": 100, "total_groups": None, "total_steps": 5, **changes}
    return DataPlan(consumer_batch=batch, group_size=2, oversampling=Fraction(share), **plan)


def domains_of(*domains, **changes):
    domains = tuple(DomainPlan(*domain) for domain in domains)
    return plan_of(domains=domains, num_rows=sum(domain.num_rows for domain in domains), **changes)


def wave(coordinator, order, dropped=lambda prompt_group: False):
    """One wave as it would be run. order: sorts its groups as they come first."""
    prompt_groups = coordinator.issue_groups()
    left = sorted(prompt_groups, key=order)
    places = Places(prompt_groups)
    surplus = []

    def complete(prompt_group):
        places.end(prompt_group, True)
        coordinator.complete(prompt_group.group_id, 3)

    while left and not places.is_full:
        prompt_group = left.pop(0)
        if dropped(prompt_group):
            places.end(prompt_group, False)
            coordinator.drop(prompt_group.group_id, "dull")
        elif places.has_place(prompt_group):
            complete(prompt_group)
        else:
            surplus.append(prompt_group)

        for waiting in [each for each in surplus if places.has_place(each)][:1]:
            surplus.remove(waiting)
            complete(waiting)

    if ended := [prompt_group.group_id for prompt_group in [*surplus, *left]]:
        coordinator.abort(sorted(ended))
    return [prompt_group.group_id for prompt_group in prompt_groups]


def step(
    coordinator,
    order=lambda prompt_group: prompt_group.group_id,
    dropped=lambda prompt_group: False,
):
    """Waves until a step is formed: its groups, and those of each wave."""
    waves = []
    while (numbers := coordinator.ready(coordinator.step)) is None:
        waves.append(wave(coordinator, order, dropped))
        assert waves[-1], "nothing starts, and no step is formed"
    coordinator.release(coordinator.step)
    return list(numbers), waves


def last_first(prompt_group):
    return -prompt_group.group_id


def test_what_is_left_goes_first_in_the_next_wave():
    coordinator = Coordinator(plan_of())
    assert step(coordinator, last_first) == ([2, 3, 4, 5], [[0, 1, 2, 3, 4, 5]])
    assert step(coordinator) == ([0, 1, 6, 7], [[0, 1, 6, 7, 8, 9]])
    group_counts = coordinator.checked_counts()
    assert (group_counts.issued, group_counts.running, group_counts.consumed) == (10, 2, 8)
    assert group_counts.aborted == 4 and group_counts.dropped == {}


def test_a_group_that_is_always_late_is_waited_for_in_the_end():
    """Of 6 in flight groups 0 and 1 always come last: they are put off three times, then their
    places are kept."""
    coordinator = Coordinator(plan_of())
    taken = [
        step(
            coordinator,
            lambda prompt_group: (prompt_group.group_id in (0, 1), prompt_group.group_id),
        )[0]
        for _ in range(5)
    ]
    steps = {number: at for at, numbers in enumerate(taken) for number in numbers}
    assert steps[0] == steps[1] == MAX_ABORTS


def test_a_place_that_was_kept_for_a_group_is_another_s_once_it_is_dropped():
    coordinator = Coordinator(plan_of())
    for _ in range(MAX_ABORTS):
        step(
            coordinator,
            lambda prompt_group: (prompt_group.group_id in (0, 1), prompt_group.group_id),
        )

    numbers, waves = step(
        coordinator,
        lambda prompt_group: (prompt_group.group_id in (0, 1), prompt_group.group_id),
        lambda prompt_group: prompt_group.group_id in (0, 1),
    )
    assert len(waves) == 1 and numbers == waves[0][2:], "no second wave for the two places"
    assert coordinator.checked_counts().dropped == {"dull": 2}


def test_a_domain_that_has_all_its_groups_gets_no_more_while_another_is_refilled():
    coordinator = Coordinator(domains_of(("good", 50, 1), ("bad", 50, 1)))
    _, waves = step(
        coordinator,
        dropped=lambda prompt_group: (
            prompt_group.stream == "train/bad" and prompt_group.position < 5
        ),
    )
    group_counts = coordinator.checked_counts().domains
    assert [len(each) for each in waves] == [6, 3, 2], (
        "3 of either, 3 for two places of the bad one, 2 for one"
    )
    assert (
        group_counts["good"].issued,
        group_counts["good"].consumed,
        group_counts["good"].aborted,
    ) == (3, 2, 1)
    assert (
        group_counts["bad"].issued,
        group_counts["bad"].consumed,
        group_counts["bad"].aborted,
    ) == (8, 2, 1)
    assert group_counts["bad"].dropped == {"dull": 5}


def test_a_domain_without_a_single_group_ends_the_run_though_others_wait():
    coordinator = Coordinator(domains_of(("good", 50, 1), ("bad", 50, 1), max_num_gen_batches=3))
    with pytest.raises(Exhausted, match="'bad'.* 6 dull"):
        step(coordinator, dropped=lambda prompt_group: prompt_group.stream == "train/bad")


def test_a_short_step_does_not_wait_for_groups_of_a_domain_that_is_full():
    plan = domains_of(
        ("good", 50, 1), ("bad", 50, 1), max_num_gen_batches=3, when_exhausted="continue"
    )
    coordinator = Coordinator(plan)
    numbers, _ = step(coordinator, dropped=lambda prompt_group: prompt_group.stream == "train/bad")
    assert len(numbers) == 2 and coordinator.checked_counts().domains["good"].consumed == 2


def test_prompts_that_were_aborted_count_among_those_that_are_tried_for_a_step():
    coordinator = Coordinator(plan_of(share="1", max_num_gen_batches=2))
    step(coordinator)
    with pytest.raises(Exhausted, match="8 drawn.*none"):
        step(coordinator, dropped=lambda prompt_group: True)


def test_only_what_runs_can_be_aborted(tmp_path):
    coordinator = Coordinator(plan_of(), Journal(tmp_path / "ledger.jsonl"))
    coordinator.issue_groups()
    coordinator.complete(0, 1)
    with pytest.raises(CountsError, match="group 0 cannot be aborted: .* complete"):
        coordinator.abort([0])
    with pytest.raises(CountsError, match="group 9 .*aborted"):
        coordinator.abort([9])


class Run:
    """Steps in which each domain drops by its chance and groups come in any order, killed after
    some of them."""

    def __init__(self, plan, folder, chances, seed):
        self.plan = plan
        self.path = folder / "ledger.jsonl"
        self.chances = chances
        self.seed = seed
        self.taken = []
        self.cut = None
        self.kept = []

    def go(self, kills=()):
        self.begin()
        while not self.coordinator.finished:
            at = self.coordinator.step
            if at in kills:
                kills = [other for other in kills if other != at]
                wave(self.coordinator, self.order, self.dropped)  # which nobody will remember
                self.ledger.close()
                self.begin()

            self.taken.append(step(self.coordinator, self.order, self.dropped))
            self.cut = json.dumps(self.coordinator.snapshot())

        self.ledger.close()
        return self

    def begin(self):
        snapshot = json.loads(self.cut) if self.cut else None
        self.ledger = Journal(self.path, mark_of(snapshot) if snapshot else None)
        self.coordinator = Coordinator(self.plan, self.ledger, snapshot)

    def order(self, prompt_group):
        return random.Random(f"{self.seed} {prompt_group.group_id} {prompt_group.version}").random()

    def dropped(self, prompt_group):
        drawn = random.Random(
            f"{self.seed} {prompt_group.group_id} {prompt_group.version} drop"
        ).random()
        return drawn < self.chances[prompt_group.stream.partition("/")[2]]


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["0.1", "1/2", "1", "5/2"]),
    st.sampled_from([None, 1, 5]),
    st.sets(st.integers(1, 7)),
)
def test_shares_are_exact_and_a_run_that_was_killed_is_the_one_that_was_not(
    tmp_path_factory, seed, share, most, kills
):
    weights = [Fraction(weight) for weight in (3, 2, 1)]
    plan = domains_of(
        ("a", 7, 3),
        ("b", 50, 2),
        ("c", 3, 1),
        batch=5,
        share=share,
        total_steps=8,
        max_concurrent=most,
    )
    chances = {"a": 0.5, "b": 0.0, "c": 0.7}
    whole = Run(plan, tmp_path_factory.mktemp("whole"), chances, seed).go()
    killed = Run(plan, tmp_path_factory.mktemp("killed"), chances, seed).go(sorted(kills))
    assert killed.taken == whole.taken
    group_counts = verify(whole.path)
    assert group_counts == verify(killed.path) == whole.coordinator.checked_counts()
    assert group_counts.consumed == 40 and group_counts.domains["b"].dropped == {}
    for name, weight in zip("abc", weights, strict=True):
        assert abs(group_counts.domains[name].consumed - weight / sum(weights) * 40) < 1
    starts = Counter(
        record["group_id"] for _, record in timeline(whole.path) if record["kind"] == "issued"
    )
    if share != "5/2":  # so many may be due at once that there is no place for all
        assert max(starts.values()) <= 1 + MAX_ABORTS
