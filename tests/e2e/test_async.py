"""Asynchronous runs: what may be stale and how far, weights in flight, aliases, evaluation beside
the stream."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from distflow.launch import rollout_engines
from distflow.observe.run_reader import read_samples, sample_steps
from distflow.runtime.spec import Spec
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.ledger_audit import verify

LONG_TAIL = (
    "data.max_response_length=480",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.max_num_seqs=4",
    "actor_rollout_ref.rollout.enforce_eager=true",
)
"""Answers end by chance at one token in a hundred; more of them are admitted than there are slots.
Without native decode steps, which would be done before the trainer comes with new weights."""


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    return Playground(tmp_path_factory.mktemp("async"), num_rows=16)


@pytest.fixture(scope="module")
def long_tail(playground):
    # or they would take longer than all the rest of a step
    quick = ("trust.check_freq=0", "trust.canary_freq=0")
    steps = ("async.max_staleness=4", "trainer.total_training_steps=20")
    return playground.run("grpo", *steps, *quick, *LONG_TAIL, name="tail")


def spans(run: Run, actor: str, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, (run.folder / "spans" / f"{actor}.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def samples(run: Run) -> Iterator[dict[str, Any]]:
    for step in sample_steps(run.folder):
        yield from read_samples(run.folder, step)


def ledger(run: Run, kind: str) -> Iterator[dict[str, Any]]:
    return (
        dict(record)
        for _, record in timeline(run.folder / "ledger.jsonl")
        if record["kind"] == kind
    )


@pytest.mark.slow
def test_answers_span_three_versions_and_a_group_is_trained_four_steps_behind_its_start(long_tail):
    decoded = spans(long_tail, "engine", "decode")
    at_work: dict[int, set[int]] = defaultdict(set)
    issued = {}
    for group in spans(long_tail, "rollout", "group"):
        issued[group["group_id"]] = group["version"]
        at_work[group["group_id"]] = {
            s["version"] for s in decoded if s["t0"] < group["t1"] and s["t1"] > group["t0"]
        }

    assert max(map(len, at_work.values())) >= 3
    rows = [row["versions"] for row in samples(long_tail)]
    assert max(map(len, rows)) >= 3, "no sample has tokens of three versions"
    ages = [
        record["step"] - 1 - issued[prompt_group]
        for record in ledger(long_tail, "consumed")
        for prompt_group in record["group_ids"]
    ]
    assert max(ages) == 4 and min(ages) == 0


@pytest.mark.slow
def test_the_ledger_shows_no_group_staler_than_the_bound(long_tail):
    account = verify(long_tail.folder / "ledger.jsonl")
    assert (
        account.consumed == 40 and account.running == account.complete == 0 and not account.dropped
    )
    assert 1 <= max(m["async/version_diff/max"] for m in long_tail.metrics()) <= 4
    assert not long_tail.notes("error")


class Pushed:
    """What went over the weight edge, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = list[int]()
        self.named = list[int]()
        commit = LocalWeights.commit
        renumber = LocalWeights.renumber

        def note_commit(port: LocalWeights, *unmoved: Any) -> None:
            assert port._version is not None
            self.sent.append(port._version.step)
            commit(port, *unmoved)

        def note_renumber(port: LocalWeights, version: Any, *hashes: Any) -> None:
            self.named.append(version.step)
            renumber(port, version, *hashes)

        monkeypatch.setattr(LocalWeights, "commit", note_commit)
        monkeypatch.setattr(LocalWeights, "renumber", note_renumber)


@pytest.mark.slow
def test_steps_without_an_update_send_nothing_and_count_on(playground, monkeypatch):
    pushed = Pushed(monkeypatch)
    run = playground.run(
        "ppo",
        "async.max_staleness=1",
        "trainer.critic_warmup=3",
        "trainer.total_training_steps=5",
        "actor_rollout_ref.rollout.n=2",
        name="warmup",
    )
    assert pushed.sent == [0, 4, 5] and pushed.named == [1, 2, 3]
    assert [(r["step"], r["weights"]) for r in ledger(run, "version")] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 4),
        (5, 5),
    ]
    assert max(m["async/version_diff/max"] for m in run.metrics()) <= 1


@pytest.mark.slow
def test_without_staleness_a_copy_on_a_thread_of_its_own_gives_the_numbers_of_shared_storage(
    playground, monkeypatch
):
    """The machinery of weights in flight, at staleness 0."""

    def apart(spec: Spec) -> Spec:
        monkeypatch.setattr(rollout_engines, "shares_weights", lambda config: False)
        return replace(spec, shares_weights=False)

    plain = playground.run(
        "grpo", "trainer.total_training_steps=5", "trainer.save_freq=5", name="plain"
    )
    copied = playground.run(
        "grpo", "trainer.total_training_steps=5", "trainer.save_freq=5", name="copied", spoil=apart
    )
    one = plain.weights(5)
    other = copied.weights(5)
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
