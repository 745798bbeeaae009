"""The simulator against a real run with the same delays, event by event: which groups start at
which weights, which groups each step trains on, and how stale they are.

The delays pass in the simulator's clock: the run's groups and steps are held, and let go in the
order in which their delays end there. So the load of the machine changes nothing.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated_run import Costs, Setup, simulate
from distflow.planning.lengths import Lengths
from distflow.runtime.spec import Spec
from distflow.scheduling.ledger import Ledger, timeline
from tests.e2e import held_groups
from tests.e2e.held_groups import Held, Key
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow
SECONDS = 600
KINDS = ("issued", "complete", "dropped", "consumed", "version")
LOCAL = ("t", "tokens")
"""Fields that differ: the time, and the tokens that the model drew."""


def records(folder: Path) -> list[Mapping[str, Any]]:
    found = (record for _, record in timeline(folder / "ledger.jsonl"))
    return [
        {key: record[key] for key in record if key not in LOCAL}
        for record in found
        if record["kind"] in KINDS
    ]


def key_of(record: Mapping[str, Any]) -> Key | None:
    """What ends in this record."""
    if record["kind"] in ("complete", "dropped"):
        return "group", record["group_id"]
    return ("step", record["step"] - 1) if record["kind"] == "version" else None


def conduct(
    held: Held, simulated: list[Mapping[str, Any]], folder: Path, errors: list[str]
) -> None:
    end, issued = time.monotonic() + SECONDS, set[Key]()

    def wait(until: Callable[[], bool], what: str) -> None:
        while not until():
            if time.monotonic() > end:
                raise TimeoutError(f"the run does not {what}")
            time.sleep(0.005)

    try:
        wait((folder / "ledger.jsonl").exists, "start")
        for place, record in enumerate(simulated):
            if record["kind"] == "issued":
                issued.add(("group", record["group_id"]))
            if (key := key_of(record)) is None:
                continue
            wait(
                lambda: {*issued, key} <= held.arrived, f"reach {key} with {issued - held.arrived}"
            )  # noqa: B023
            held.let_go(key)
            wait(lambda: len(records(folder)) > place, f"write {record}")  # noqa: B023
    except TimeoutError as error:
        errors.append(str(error))
    finally:
        held.let_go()


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_makes_every_move_of_the_simulated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, seed: int
) -> None:
    ground = Playground(tmp_path, num_rows=16)
    keys = (
        f"async.max_staleness={staleness}",
        "trainer.total_training_steps=5",
        "actor_rollout_ref.rollout.n=2",
    )
    keys += (f"reward.timeout_s={SECONDS}",)
    quick = ("trust.check_freq=0", "trust.canary_freq=0", "dag.pipeline=tests.e2e.held_groups:make")
    held, errors, conductors = Held(), list[str](), list[threading.Thread]()
    monkeypatch.setattr(held_groups, "HELD", held)

    def begin(spec: Spec) -> Spec:
        costs = Costs(
            lambda *_: 0.0,
            lambda _: 0.0,
            lambda _: 1.5,
            reward=lambda random: random.expovariate(1),
        )
        setup = Setup(spec.data, costs, Lengths(4, (8.0,), 10), filtered=0.25, seed=seed)
        (tmp_path / "simulated").mkdir()
        with Ledger(tmp_path / "simulated" / "ledger.jsonl") as ledger:
            simulate(setup, ledger)
        simulated = records(tmp_path / "simulated")
        held.dropped = {record["group_id"] for record in simulated if record["kind"] == "dropped"}
        conductors.append(
            threading.Thread(target=conduct, args=(held, simulated, tmp_path / "run", errors))
        )
        conductors[0].start()
        return spec

    ground.run("grpo", *keys, *quick, spoil=begin)
    conductors[0].join()
    assert errors == []
    assert records(tmp_path / "run") == records(tmp_path / "simulated")
    assert held.dropped, "no group was dropped"
