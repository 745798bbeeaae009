"""Random interleavings of everything that can happen to a coordinator, crashes included, against a plain model."""

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distflow.flow.coordinator import Coordinator, DataPlan, mark_of
from distflow.flow.ledger import Ledger, replay, verify
from distflow.flow.order import total_steps


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


class Run(RuleBasedStateMachine):
    """Which rows are dropped is fixed by the rows, as a filter would; everything else comes in any order."""

    @initialize(
        num_rows=st.integers(1, 7),
        batch=st.integers(1, 4),
        epochs=st.integers(1, 3),
        max_concurrent=st.none() | st.integers(1, 5),
        shape=st.data(),
    )
    def start(self, num_rows, batch, epochs, max_concurrent, shape):
        tickets = epochs * num_rows
        self.plan = DataPlan(
            num_rows=num_rows,
            consumer_batch=batch,
            group_size=2,
            total_tickets=tickets,
            total_steps=shape.draw(st.integers(1, total_steps(epochs, num_rows, batch))),
            shuffle=False,
            max_concurrent=max_concurrent,
        )
        places = st.tuples(st.integers(0, epochs - 1), st.integers(0, num_rows - 1))
        self.dropped_rows = shape.draw(st.sets(places, max_size=tickets))
        self.expected = expected_steps(self.plan, self.dropped_rows)
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.jsonl")
        self.coordinator = Coordinator(self.plan, self.ledger)
        self.running = {}
        self.consumed = []
        self.checkpoints = []

    @rule()
    def take(self):
        tickets = self.coordinator.take_tickets()
        assert not (tickets and self.running), "a wave opened while the last one runs"
        for ticket in tickets:
            assert ticket.number not in self.running
            self.running[ticket.number] = ticket

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def judge(self, choice):
        number = choice.choice(sorted(self.running))
        ticket = self.running.pop(number)
        if (ticket.epoch, ticket.row) in self.dropped_rows:
            self.coordinator.drop(number, "equal_rewards")
        else:
            self.coordinator.complete(number, 3)

    @precondition(lambda self: any(ticket.attempt < 2 for ticket in self.running.values()))
    @rule(choice=st.randoms(use_true_random=False))
    def lose_a_worker(self, choice):
        number = choice.choice([n for n, ticket in sorted(self.running.items()) if ticket.attempt < 2])
        self.running[number] = self.coordinator.retry(number)

    @precondition(lambda self: not self.coordinator.finished)
    @rule(published=st.booleans())
    def train(self, published):
        step = self.coordinator.step
        numbers = self.coordinator.ready(step)
        if numbers is not None:
            self.coordinator.release(step, published)
            self.consumed.append(numbers)

    @rule()
    def save(self):
        self.checkpoints.append(json.dumps([self.coordinator.snapshot(), self.consumed]))

    @rule(choice=st.randoms(use_true_random=False), torn=st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")))
    def crash(self, choice, torn):
        """Any checkpoint, not only the newest, may be the one that is resumed."""
        self.ledger.close()
        if torn:
            with self.ledger.path.open("ab") as file:
                file.write(b"{" + torn)
        saved = choice.choice([json.dumps([None, []]), *self.checkpoints])
        snapshot, consumed = json.loads(saved)
        self.consumed = [tuple(step) for step in consumed]
        self.ledger = Ledger(self.ledger.path, mark_of(snapshot) if snapshot else None)
        self.coordinator = Coordinator(self.plan, self.ledger, snapshot)
        self.running = {}

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "coordinator"):
            return
        account = self.coordinator.accounting()
        account.check()
        assert account == self.ledger.account == replay(self.ledger.path)
        assert account.running == len(self.running)
        assert account.consumed == sum(map(len, self.consumed))
        assert self.consumed == self.expected[: len(self.consumed)]
        assert self.coordinator.version.incarnation == self.ledger.incarnation

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
                    number, ticket = self.running.popitem()
                    if (ticket.epoch, ticket.row) in self.dropped_rows:
                        self.coordinator.drop(number, "equal_rewards")
                    else:
                        self.coordinator.complete(number, 3)
                if not self.coordinator.finished:
                    self.train(True)
            assert self.coordinator.finished, "the run is stuck"
            assert self.consumed == self.expected
            self.ledger.close()
            assert verify(self.ledger.path) == self.coordinator.accounting()
        finally:
            shutil.rmtree(self.folder)


TestRun = Run.TestCase
TestRun.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=40)
