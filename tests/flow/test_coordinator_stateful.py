"""Random interleavings of everything that can happen to a coordinator, crashes included, against a plain model."""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distflow.flow.coordinator import Coordinator, mark_of
from distflow.flow.data_plan import DataPlan
from distflow.flow.edge import smallest_prefix
from distflow.flow.ledger import Ledger, replay, verify
from distflow.flow.order import total_steps

NOTHING = "[[], [], [], [], {}]"
"""The model at the start: consumed, dropped, complete, failures, waiting."""


def expected_steps(plan, dropped_rows):
    """The steps of the run, from the rule alone: walk the tickets, keep the survivors, cut batches of them."""
    steps, current = [], []
    for number in range(plan.total_tickets):
        if len(steps) == plan.total_steps:
            return steps
        if (number // plan.num_rows, number % plan.num_rows) not in dropped_rows:
            current.append(number)
        if len(current) == plan.consumer_batch:
            steps.append(tuple(current))
            current = []
    return [*steps, tuple(current)] if current and len(steps) < plan.total_steps else steps


def oldest_complete(groups, step, wanted):
    """A rule that leaves groups behind where some run ahead."""
    complete = [group.ticket.number for group in groups if group.complete]
    return tuple(complete[:wanted]) if len(complete) >= wanted else None


class Run(RuleBasedStateMachine):
    """Which rows are dropped is fixed by the rows, as a filter would; everything else comes in any order."""

    @initialize(
        num_rows=st.integers(1, 7),
        batch=st.integers(1, 4),
        epochs=st.integers(1, 3),
        staleness=st.sampled_from([0, 0, 1, 3]),
        max_concurrent=st.none() | st.integers(1, 9),
        shape=st.data(),
    )
    def start(self, num_rows, batch, epochs, staleness, max_concurrent, shape):
        tickets = epochs * num_rows
        self.plan = DataPlan(
            num_rows=num_rows,
            consumer_batch=batch,
            group_size=2,
            total_tickets=tickets,
            total_steps=shape.draw(st.integers(1, total_steps(epochs, num_rows, batch))),
            shuffle=False,
            max_staleness=staleness,
            max_concurrent=max_concurrent,
        )
        places = st.tuples(st.integers(0, epochs - 1), st.integers(0, num_rows - 1))
        self.dropped_rows = shape.draw(st.sets(places, max_size=tickets))
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.jsonl")
        self.coordinator = self.coordinator_of(None)
        self.restore(json.loads(NOTHING))
        self.mark()
        self.checkpoints = [self.cut]

    def coordinator_of(self, snapshot):
        choose = oldest_complete if self.plan.max_staleness else smallest_prefix
        return Coordinator(self.plan, self.ledger, snapshot, choose)

    def mark(self):
        """The model as of the release, or the start, that a snapshot goes back to."""
        running = {number: ticket.attempt for number, ticket in self.running.items()}
        model = [self.consumed, self.dropped, self.complete, list(self.failures.items()), {**running, **self.waiting}]
        self.cut = json.dumps([self.coordinator.snapshot(), model])

    def restore(self, model):
        """What ran at the cut waits, with the attempt that was lost."""
        consumed, self.dropped, self.complete, failures, waiting = model
        self.consumed = [tuple(step) for step in consumed]
        self.failures = Counter(dict(failures))
        self.waiting = {int(number): attempt for number, attempt in waiting.items()}
        self.running = {}

    @rule()
    def take(self):
        tickets = self.coordinator.take_tickets()
        assert self.plan.max_staleness or not (tickets and self.running), "a wave opened while the last one runs"
        lost = [ticket.number for ticket in tickets if ticket.number in self.waiting]
        assert lost == [ticket.number for ticket in tickets][: len(lost)] == sorted(lost), "lost ones come first"
        for ticket in tickets:
            assert ticket.number not in self.running
            assert ticket.attempt == self.waiting.pop(ticket.number, -1) + 1
            self.running[ticket.number] = ticket
        assert len(self.running) <= (self.plan.max_concurrent or self.plan.consumer_batch)

    def end(self, number):
        """A group ends as its row wants."""
        ticket = self.running.pop(number)
        if (ticket.epoch, ticket.row) in self.dropped_rows:
            self.coordinator.drop(number, "equal_rewards")
            self.dropped.append(number)
        else:
            self.coordinator.complete(number, 3)
            self.complete.append(number)

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def judge(self, choice):
        self.end(choice.choice(sorted(self.running)))

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def lose_a_worker(self, choice):
        number = choice.choice(sorted(self.running))
        ticket = self.running.pop(number)
        self.failures[number] += 1
        assert self.coordinator.retry(number) == (self.failures[number] < 3)
        if self.failures[number] < 3:
            self.waiting[number] = ticket.attempt
        else:
            self.dropped.append(number)

    @precondition(lambda self: not self.coordinator.finished)
    @rule(published=st.booleans())
    def train(self, published):
        step = self.coordinator.step
        numbers = self.coordinator.ready(step)
        if numbers is not None:
            self.coordinator.release(step, published)
            self.consumed.append(numbers)
            self.complete = [number for number in self.complete if number not in numbers]
            self.mark()

    @rule()
    def save(self):
        self.checkpoints.append(self.cut)

    @rule(
        choice=st.randoms(use_true_random=False),
        torn=st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")),
        elsewhere=st.booleans(),
    )
    def crash(self, choice, torn, elsewhere):
        """Any checkpoint, not only the newest, may be the one that is resumed, in its folder or in another."""
        self.ledger.close()
        if torn:
            with self.ledger.path.open("ab") as file:
                file.write(b"{" + torn)
        snapshot, model = json.loads(choice.choice(self.checkpoints))
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "ledger.jsonl" if elsewhere else self.ledger.path
        self.ledger = Ledger(path, mark_of(snapshot))
        self.coordinator = self.coordinator_of(snapshot)
        self.restore(model)
        self.mark()
        self.checkpoints.append(self.cut)

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "coordinator"):
            return
        account = self.coordinator.accounting()
        account.check()
        assert account == self.ledger.account == replay(self.ledger.path)
        assert account.running == len(self.running) + len(self.waiting)
        assert account.complete == len(self.complete)
        assert sum(account.dropped.values()) == len(self.dropped)
        assert account.consumed == sum(map(len, self.consumed))
        assert self.coordinator.version.incarnation == self.ledger.incarnation
        self.every_ticket_is_in_one_place()
        if self.plan.max_staleness == 0:
            assert self.consumed == self.expected()[: len(self.consumed)]

    def every_ticket_is_in_one_place(self):
        consumed = [number for step in self.consumed for number in step]
        known = sorted([*consumed, *self.dropped, *self.complete, *self.running, *self.waiting])
        assert known == list(range(self.coordinator.accounting().issued))

    def expected(self):
        quarantined = {(n // self.plan.num_rows, n % self.plan.num_rows) for n in self.dropped}
        return expected_steps(self.plan, self.dropped_rows | quarantined)

    def teardown(self):
        """From wherever it stands, the run reaches its end and has trained exactly what it should."""
        if not hasattr(self, "coordinator"):
            return
        try:
            for _ in range(10 * self.plan.total_tickets + 10):
                if self.coordinator.finished:
                    break
                self.take()
                while self.running:
                    self.end(max(self.running))
                if not self.coordinator.finished:
                    self.train(True)
            assert self.coordinator.finished, "the run is stuck"
            self.every_ticket_is_in_one_place()
            if self.plan.max_staleness == 0:
                assert self.consumed == self.expected()
            elif self.coordinator.step < self.plan.total_steps:
                assert not self.complete and self.coordinator.accounting().issued == self.plan.total_tickets
            self.ledger.close()
            assert verify(self.ledger.path) == self.coordinator.accounting()
        finally:
            shutil.rmtree(self.folder)


TestRun = Run.TestCase
TestRun.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=40)
