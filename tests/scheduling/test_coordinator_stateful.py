"""Random interleavings of everything that can happen to a coordinator, crashes included, against a
plain model."""

import json
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan, total_steps
from distflow.scheduling.ledger import Ledger
from distflow.scheduling.sample_queue import Exhausted
from tests.ledger_audit import verify
from tests.ledger_counts import counted

NOTHING = {
    "consumed": [],
    "dropped": [],
    "complete": [],
    "failures": [],
    "attempts": [],
    "waiting": [],
}
"""The model at the start. consumed: groups by step. complete: group, its version, the lowest of its
tokens.
attempts: group, its last. waiting: group, attempt that was lost."""


def expected_steps(plan, dropped_rows):
    """The steps of a run without staleness, from the rule alone: walk the groups, keep the
    survivors, cut batches."""
    steps = []
    current = []
    for number in range(plan.total_groups):
        if len(steps) == plan.total_steps:
            return steps

        if place_of(plan, number) not in dropped_rows:
            current.append(number)

        if len(current) == plan.consumer_batch:
            steps.append(tuple(current))
            current = []

    return [*steps, tuple(current)] if current and len(steps) < plan.total_steps else steps


def place_of(plan, number):
    return number // plan.num_rows, number % plan.num_rows


def num_consumable(dues, step, batch):
    """How many groups the steps from `step` on can consume in time at most: a maximum matching of
    groups with the slots of steps, by augmenting paths."""
    slots = [(s, i) for s in range(step, max(dues, default=0) + 1) for i in range(batch)]
    owner = {}

    def place(group, seen):
        for slot in slots:
            if slot[0] <= dues[group] and slot not in seen:
                seen.add(slot)
                if slot not in owner or place(owner[slot], seen):
                    owner[slot] = group
                    return True

        return False

    return sum(place(group, set()) for group in range(len(dues)))


class Journal(Ledger):
    """Whose disk nobody waits for."""

    def sync(self):
        pass


class Run(RuleBasedStateMachine):
    """Which rows are dropped is fixed by the rows, as a filter would; everything else comes in any
    order.

    The engine has `engine_version`; `coming` is a version that was sent and has not arrived yet.
    """

    @initialize(
        num_rows=st.sampled_from([20, 7, 3, 2, 1]),
        batch=st.integers(1, 4),
        epochs=st.integers(1, 4),
        endless=st.booleans(),
        num_steps=st.sampled_from([30, 30, 12, 5, 2, 1]),
        staleness=st.sampled_from([0, 0, 1, 2, 3, 4]),
        max_concurrent=st.none() | st.integers(1, 9),
        batches=st.none() | st.integers(1, 3),
        when_exhausted=st.sampled_from(["error", "continue"]),
        drops=st.sampled_from([0, 0.3, 0.7]),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(
        self,
        num_rows,
        batch,
        epochs,
        endless,
        num_steps,
        staleness,
        max_concurrent,
        batches,
        when_exhausted,
        drops,
        seed,
    ):
        prompt_groups = epochs * num_rows
        self.plan = DataPlan(
            num_rows=num_rows,
            consumer_batch=batch,
            group_size=2,
            total_groups=None if endless else prompt_groups,
            total_steps=num_steps
            if endless
            else min(num_steps, total_steps(epochs, num_rows, batch)),
            shuffle=False,
            max_staleness=staleness,
            max_concurrent=max_concurrent,
            max_num_gen_batches=batches,
            when_exhausted=when_exhausted,
        )
        self.always_synchronous = staleness == 0
        self.same_plan = True
        choice = random.Random(seed)
        self.dropped_rows = {
            place_of(self.plan, n) for n in range(prompt_groups) if choice.random() < drops
        }
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Journal(self.folder / "ledger.jsonl")
        self.begin(None, NOTHING)
        self.checkpoints = [self.cut]

    def begin(self, snapshot, model):
        """A process starts: what ran at the cut waits, with the attempt that was lost."""
        self.coordinator = Coordinator(self.plan, self.ledger, snapshot)
        if snapshot:
            assert all(group in snapshot["live"] for group in self.coordinator.snapshot()["live"])
        self.consumed = [tuple(step) for step in model["consumed"]]
        self.dropped = list(model["dropped"])
        self.failures = Counter(dict(model["failures"]))
        self.waiting = dict(model["waiting"])
        self.attempts = dict(model["attempts"])
        self.running = {}
        self.complete = {number: (issued, lowest) for number, issued, lowest in model["complete"]}
        self.engine_version = self.sent = self.coordinator.step
        self.coming = None
        self.drawn = []  # due steps of the groups that this process issued first
        self.first_step = self.coordinator.step
        self.exhausted = False
        self.forget_stale()
        self.mark()

    def forget_stale(self):
        """What the coordinator gave up could not be consumed in time, and no smaller number could
        be given up."""
        stale = [number for number in self.complete if not self.coordinator.queue.holds(number)]
        dues = [version + self.plan.max_staleness for version, _ in self.complete.values()]
        kept = num_consumable(dues, self.coordinator.step, self.plan.consumer_batch)
        assert len(self.complete) - len(stale) == kept
        assert self.same_plan is False or not stale

        for number in stale:
            del self.complete[number]
            self.dropped.append(number)

    def mark(self):
        """The model as of the release, or the start, that a snapshot goes back to."""
        running = {number: prompt_group.attempt for number, prompt_group in self.running.items()}
        model = {
            "consumed": self.consumed,
            "dropped": self.dropped,
            "complete": [[number, *versions] for number, versions in self.complete.items()],
            "failures": list(self.failures.items()),
            "attempts": list(self.attempts.items()),
            "waiting": list({**running, **self.waiting}.items()),
        }
        self.cut = json.dumps([self.coordinator.snapshot(), model])

    @property
    def plays(self):
        return not self.exhausted and not self.coordinator.finished

    @rule()
    def take(self):
        plan = self.plan
        finished = self.coordinator.finished
        prompt_groups = self.coordinator.issue_groups(self.engine_version)
        assert not (finished and prompt_groups)
        assert plan.max_staleness or not (prompt_groups and self.running), (
            "a wave opened while the last one runs"
        )
        lost = [
            prompt_group.group_id
            for prompt_group in prompt_groups
            if prompt_group.group_id in self.waiting
        ]
        assert (
            lost
            == [prompt_group.group_id for prompt_group in prompt_groups][: len(lost)]
            == sorted(lost)
        ), "lost ones come first"

        for prompt_group in prompt_groups:
            assert (
                prompt_group.group_id not in self.running
                and prompt_group.group_id not in self.complete
            )
            assert prompt_group.version == min(self.engine_version, self.coordinator.step)
            if prompt_group.group_id not in self.waiting:
                self.drawn.append(prompt_group.version + plan.max_staleness)
            assert prompt_group.attempt == self.waiting.pop(prompt_group.group_id, -1) + 1
            self.running[prompt_group.group_id] = prompt_group
            self.attempts[prompt_group.group_id] = prompt_group.attempt

        assert not self.coordinator.issue_groups(self.engine_version), "all that may start did"
        assert self.coordinator.stalled == (not self.running)
        bound = plan.max_concurrent or (plan.max_staleness + 1) * plan.consumer_batch
        assert len(self.running) <= bound

        if prompt_groups:
            steps_left = plan.total_steps - self.coordinator.step
            assert len(self.running) + len(self.complete) <= steps_left * plan.consumer_batch

        if plan.max_num_gen_batches is not None:
            assert all(drawn <= allowed for drawn, allowed in self.draws().values())

    def draws(self):
        """By due step: groups issued, and how many may be."""
        counts = Counter(self.drawn)
        covered_to = self.first_step - 1
        draws = {}
        for due in sorted(counts):
            draws[due] = (
                counts[due],
                self.plan.max_num_gen_batches * self.plan.consumer_batch * (due - covered_to),
            )
            covered_to = due

        return draws

    def end(self, number, late=False):
        """A group ends as its row wants. late: its first token was made by what the engine serves
        now."""
        prompt_group = self.running.pop(number)
        if (prompt_group.epoch, prompt_group.row) in self.dropped_rows:
            self.coordinator.drop(number, "equal_rewards")
            self.dropped.append(number)
        else:
            lowest = self.engine_version if late else prompt_group.version
            self.coordinator.complete(number, 3, lowest)
            self.complete[number] = (prompt_group.version, lowest)
            assert self.coordinator.queue.holds(number)

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False), late=st.booleans())
    def reward_fn(self, choice, late):
        self.end(choice.choice(sorted(self.running)), late)

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def lose_a_worker(self, choice):
        number = choice.choice(sorted(self.running))
        prompt_group = self.running.pop(number)
        self.failures[number] += 1
        assert self.coordinator.retry(number) == (self.failures[number] < 3)

        if self.failures[number] < 3:
            self.waiting[number] = prompt_group.attempt
        else:
            self.dropped.append(number)

    @precondition(lambda self: self.complete)
    @rule(choice=st.randoms(use_true_random=False))
    def lose_what_a_worker_made(self, choice):
        number = choice.choice(sorted(self.complete))
        del self.complete[number]
        self.coordinator.lose(number)
        assert not self.coordinator.queue.holds(number)
        self.waiting[number] = self.attempts[number]

    @precondition(lambda self: self.plays)
    @rule(
        how=st.sampled_from(["sent", "sent", "late", "same weights", "held"]),
        takes=st.booleans(),
        unread=st.sampled_from([False] * 4 + [True]),
    )
    def train(self, how="sent", takes=False, unread=False):
        """unread: its groups could not be read, and wait again.

        how: the weights are sent and arrive at once, or not yet; nothing was updated and the engine
        only gets a new number; or it keeps what it has. takes: groups are taken between sending and
        releasing."""
        step = self.coordinator.step
        plan = self.plan
        try:
            numbers = self.coordinator.ready(step)
        except Exhausted:
            self.check_exhausted()
            assert plan.when_exhausted == "error" or not self.complete
            self.exhausted = True
            return

        if numbers is None:
            return

        self.check_step(step, numbers)
        if unread:
            self.coordinator.queue.untake()
            assert self.coordinator.queue.untaken == sorted(self.complete)
            return

        if how == "held" and step + 1 - self.sent > plan.max_staleness:
            how = "sent"

        if how in ("sent", "same weights"):
            self.engine_version = step + 1
            self.coming = None

        if how == "late":
            self.coming = step + 1
        if how != "held":
            self.sent = step + 1
        if takes:
            self.take()
        version = self.coordinator.release(step, sent_weights=how in ("sent", "late"))
        assert version.step == step + 1
        for number in numbers:
            del self.complete[number]
        self.consumed.append(numbers)
        self.mark()

    def check_step(self, step, numbers):
        plan = self.plan
        assert list(numbers) == sorted(numbers) and 0 < len(numbers) <= plan.consumer_batch

        for number in numbers:
            issued, lowest = self.complete[number]
            assert 0 <= step - lowest <= plan.max_staleness, "staler than allowed"
            assert step <= issued + plan.max_staleness, (
                "a group was left past the step that it was due at"
            )

        if len(numbers) < plan.consumer_batch:
            assert len(self.complete) == len(numbers) and not self.running and not self.waiting
            if self.coordinator.checked_counts().issued != plan.total_groups:
                assert plan.when_exhausted == "continue"
                self.check_exhausted()
            return

        order = sorted(self.complete, key=lambda number: (self.complete[number][0], number))
        assert sorted(order[: plan.consumer_batch]) == list(numbers), "first what is due first"

    def check_exhausted(self):
        """Nothing that runs and no group that may still be drawn could have filled the step."""
        assert (
            len(self.complete) < self.plan.consumer_batch and not self.running and not self.waiting
        )
        assert self.coming is None, "a version is on its way"
        drawn, allowed = self.draws()[self.engine_version + self.plan.max_staleness]
        assert drawn == allowed

    @precondition(lambda self: self.coming is not None)
    @rule()
    def arrive(self):
        self.engine_version = self.coming
        self.coming = None

    @rule(seed=st.integers(0, 2**32 - 1))
    def play(self, seed):
        """Many moves of a run that nothing disturbs: old groups may straggle, and either side may
        be the faster one."""
        choice = random.Random(seed)
        straggle = choice.choice([0, 0.9])
        trains = choice.choice([0.25, 0.5])

        for _ in range(choice.randint(1, 60)):
            move = choice.random()
            if move < 0.2:
                self.take()
            elif move < trains and self.plays:
                self.train(
                    choice.choice(["sent", "late", "same weights", "held"]), choice.random() < 0.3
                )
            elif move > 0.95 and self.coming is not None:
                self.arrive()
            elif self.running:
                oldest_last = choice.random() < straggle
                self.end(
                    max(self.running) if oldest_last else choice.choice(sorted(self.running)),
                    choice.random() < 0.2,
                )

    @rule()
    def save(self):
        self.checkpoints.append(self.cut)

    @rule(
        choice=st.randoms(use_true_random=False),
        newest=st.booleans(),
        torn=st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")),
        elsewhere=st.booleans(),
        staleness=st.none() | st.integers(0, 4),
        batch=st.none() | st.integers(1, 4),
    )
    def crash(self, choice, newest, torn, elsewhere, staleness, batch):
        """Any checkpoint, not only the newest, may be the one that is resumed, in its folder or in
        another, with the same bounds or with others."""
        self.ledger.close()
        if torn:
            with self.ledger.path.open("ab") as file:
                file.write(b"{" + torn)

        snapshot, model = json.loads(self.cut if newest else choice.choice(self.checkpoints))
        path = (
            Path(tempfile.mkdtemp(dir=self.folder)) / "ledger.jsonl"
            if elsewhere
            else self.ledger.path
        )
        self.ledger = Journal(path, mark_of(snapshot))
        self.change(snapshot, staleness, batch)
        self.begin(snapshot, model)
        self.checkpoints.append(self.cut)

    def change(self, snapshot, staleness, batch):
        plan = self.plan
        changes = {
            "max_staleness": plan.max_staleness if staleness is None else staleness,
            "consumer_batch": batch or plan.consumer_batch,
        }
        self.always_synchronous &= changes["max_staleness"] == 0

        if changes["consumer_batch"] != plan.consumer_batch and plan.total_groups is not None:
            left = plan.total_groups - snapshot["issued"] + len(snapshot["live"])
            changes["total_steps"] = snapshot["step"] + -(-left // changes["consumer_batch"])

        changed = replace(plan, **changes)
        self.same_plan &= changed == plan
        self.plan = changed

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "coordinator"):
            return

        group_counts = self.coordinator.checked_counts()
        group_counts.check()
        assert group_counts == counted(self.ledger.path)
        assert group_counts.running == len(self.running) + len(self.waiting)
        assert group_counts.complete == len(self.complete)
        assert sum(group_counts.dropped.values()) == len(self.dropped)
        assert group_counts.consumed == sum(map(len, self.consumed))
        assert self.coordinator.version.restart == self.ledger.restart
        self.every_ticket_is_in_one_place()
        self.every_group_has_a_step_to_go_to()

        if (
            self.always_synchronous
            and self.same_plan
            and self.plan.total_groups
            and not self.plan.max_num_gen_batches
        ):
            assert self.consumed == self.expected()[: len(self.consumed)]

    def every_ticket_is_in_one_place(self):
        consumed = [number for step in self.consumed for number in step]
        known = sorted([*consumed, *self.dropped, *self.complete, *self.running, *self.waiting])
        assert known == list(range(self.coordinator.checked_counts().issued))

    def every_group_has_a_step_to_go_to(self):
        """Admission never lets in more than can be consumed in time, whatever ran or was lost."""
        plan = self.plan
        step = self.coordinator.step
        versions = [prompt_group.version for prompt_group in self.running.values()] + [
            v for v, _ in self.complete.values()
        ]
        dues = sorted(version + plan.max_staleness for version in versions)
        for position, due in enumerate(dues):
            assert position < (due - step + 1) * plan.consumer_batch

    def expected(self):
        max_retries = {place_of(self.plan, number) for number in self.dropped}
        return expected_steps(self.plan, self.dropped_rows | max_retries)

    def teardown(self):
        """From wherever it stands: once what runs has ended and what was sent has arrived, the next
        step forms, unless the run is over; and at its end it has trained what it should."""
        if not hasattr(self, "coordinator"):
            return

        try:
            while self.plays:
                self.engine_version = self.coming or self.engine_version
                self.coming = None

                for _ in range(1000):
                    self.take()
                    if not self.running:
                        break
                    while self.running:
                        self.end(max(self.running))
                else:
                    raise AssertionError("groups are drawn for ever")

                if self.plays:
                    step = self.coordinator.step
                    self.train(["sent", "held", "late"][step % 3])
                    assert self.exhausted or self.coordinator.step > step, "the run is stuck"

            self.accounts_agree()
            if self.same_plan and self.coordinator.finished:
                assert not self.running and not self.waiting and not self.complete, (
                    "drawn for no step"
                )

            if self.coordinator.step < self.plan.total_steps and not self.exhausted:
                assert self.coordinator.checked_counts().issued == self.plan.total_groups
            self.ledger.close()
            assert verify(self.ledger.path) == self.coordinator.checked_counts()
        finally:
            shutil.rmtree(self.folder)


TestRun = Run.TestCase
TestRun.settings = settings(
    derandomize=True, deadline=None, max_examples=50, stateful_step_count=25
)


def walk(seed):
    """A long run in random moves, of which most go on and some are mishaps."""
    choice = random.Random(seed)
    run = Run()
    run.start(
        num_rows=choice.choice([3, 7, 50]),
        batch=choice.randint(1, 4),
        epochs=choice.randint(1, 4),
        endless=choice.random() < 0.5,
        num_steps=choice.randint(5, 30),
        staleness=choice.randint(0, 4),
        max_concurrent=choice.choice([None, None, None, 2, 7]),
        batches=choice.choice([None, None, 1, 2, 4]),
        when_exhausted=choice.choice(["error", "continue"]),
        drops=choice.choice([0, 0, 0.3, 0.6]),
        seed=seed,
    )

    for _ in range(choice.randint(5, 25)):
        run.play(choice.random())
        move = choice.random()
        if move < 0.3 and run.running:
            run.lose_a_worker(choice)
        elif move < 0.5:
            run.save()
        elif move < 0.75:
            changed = choice.choice(
                [(None, None), (choice.randint(0, 4), None), (None, choice.randint(1, 4))]
            )
            run.crash(choice, choice.random() < 0.7, b"torn", choice.random() < 0.2, *changed)

        run.accounts_agree()

    run.teardown()


@pytest.mark.slow
@pytest.mark.by_hand
def test_long_walks():
    for seed in range(200):
        walk(seed)
