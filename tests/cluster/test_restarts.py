"""Workers that only generate die or stop over a real Ray, and the run goes on; every fault is seen
to have fired."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.runtime import fault_injection
from distflow.runtime.fault_injection import Fault
from distflow.scheduling import ledger
from tests.cluster.test_faults import workers
from tests.cluster.test_supervisor import STEPS, distance, validating
from tests.e2e.runs import Playground, Run
from tests.ledger_audit import verify
from tests.patience import wait_until
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = [pytest.mark.slow, pytest.mark.faults]

TWO_GENERATE = ("trainer.launcher=ray", "trainer.allocation='embedded[rollout]:d2+torch[actor]:d1'")
ONE_GENERATES = (
    "trainer.launcher=ray",
    "trainer.allocation='embedded[rollout]:d1+torch[actor]:d1'",
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    return Playground(tmp_path_factory.mktemp("runs"))


@contextmanager
def nothing_left() -> Iterator[None]:
    yield
    wait_until(lambda: not workers(), "no worker is left")


def run(ground: Playground, *overrides: str, name: str) -> Run:
    """From its start, also where the test is tried once more."""
    shutil.rmtree(ground.folder / name, ignore_errors=True)
    config, spec = ground.spec("grpo", *overrides, name=name)
    with nothing_left():
        return Run(ground.folder / name, config, launch_ray(spec))


def generators(run: Run) -> list[int]:
    """Ranks that only generate."""
    ranks = json.loads((run.folder / "plan.json").read_text())["ranks"]
    return [rank["rank"] for rank in ranks if rank["rollout_nodes"] and not rank["training_nodes"]]


def check_whole(found: Run, steps: int = 4) -> None:
    """All steps were made of all groups, each trained once."""
    journal = found.folder / "ledger.jsonl"
    group_counts = verify(journal)
    consumed = [
        n
        for _, record in ledger.timeline(journal)
        if record["kind"] == "consumed"
        for n in record["group_ids"]
    ]
    assert found.outcome.steps == steps and found.notes("end") == ["the run finished"]
    assert sorted(consumed) == list(range(4 * steps)) and not group_counts.dropped


def attempts(run: Run) -> list[int]:
    """How many groups were issued for the second time, third time, ..."""
    records = [r for _, r in ledger.timeline(run.folder / "ledger.jsonl") if r["kind"] == "issued"]
    return [record["attempt"] for record in records if record["attempt"]]


@pytest.fixture(scope="module")
def alone(ground):
    return ground.run("grpo", *STEPS, *validating(ground), name="alone")


def test_workers_killed_in_a_validation_and_with_groups_are_replaced_and_the_results_are_the_same(
    ground, alone, plan
):
    """The second dies before the first is back: what it had made is made again, by newest weights.
    The one that is back first may end the run before the other is ready."""
    plan(Fault("rollout.generate", rank=1, call=4), Fault("queue.put", rank=0, call=2))
    found = run(ground, *TWO_GENERATE, *STEPS, *validating(ground), name="killed")
    assert generators(found) == [0, 1]
    check_whole(found)
    assert attempts(found) and set(attempts(found)) == {1}
    notes = " ".join(found.notes("warning"))
    assert all(f"worker {victim} of 3, which generates, has died" in notes for victim in (0, 1))
    assert notes.count("a replacement is started") == 2 and "runs again" in notes
    assert distance(found.weights(4), alone.weights(4)) < 1e-6


def test_groups_that_die_with_their_worker_between_their_step_and_its_reader_are_made_again(
    ground, alone, plan, fault_plan
):
    """The trainer is stopped while it waits for the step; its answer comes, and who made the groups
    dies, before it is read."""
    plan(Fault("queue.put", rank=0, call=8, action="SIGSTOP"))  # the last group of the second step
    journal = ground.folder / "lost" / "ledger.jsonl"

    def strike() -> None:
        wait_until(
            lambda: fault_injection.fired(fault_plan) and any(map(is_stopped, workers())),
            "it puts",
            within_s=300.0,
        )
        makes = next(pid for pid in workers() if is_stopped(pid))
        (trains,) = (pid for pid in workers() if pid != makes)
        os.kill(trains, signal.SIGSTOP)
        os.kill(makes, signal.SIGCONT)
        wait_until(lambda: journal.read_text().count('"complete"') == 8, "the step is complete")
        time.sleep(1.0)  # until the answer is there
        os.kill(makes, signal.SIGKILL)
        time.sleep(3.0)  # until Ray knows
        os.kill(trains, signal.SIGCONT)

    threading.Thread(target=strike, daemon=True).start()
    found = run(ground, *ONE_GENERATES, *STEPS, *validating(ground), name="lost")
    check_whole(found)
    assert set(attempts(found)) == {1}
    assert distance(found.weights(4), alone.weights(4)) < 1e-6


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


TURNS = """
async def turns(chat, row):
    reply = await chat.ask(row.prompt, max_tokens=3)
    while chat.turns < 3:
        reply = await chat.ask(reply.text[::-1] + "=", max_tokens=3)
    return sum(chat.token_ids) % 7 / 6
"""


@pytest.mark.parametrize("staleness", one_fast_in(3, [0, 1, 4], others=BY_HAND))
def test_episodes_under_way_are_issued_again_under_their_group_ids_and_end_as_undisturbed_ones(
    ground, plan, staleness
):
    """The worker is killed as it sends a later turn: each of its groups has one request in the
    first turn."""
    (ground.folder / "turns.py").write_text(TURNS)
    more = (
        f"actor_rollout_ref.rollout.workflow={ground.folder}/turns.py:turns",
        f"async.max_staleness={staleness}",
    )
    keys = (
        "~reward.functions",
        "custom_reward_function.path=null",
        "~reward.num_workers",
        "data.max_response_length=24",
    )
    plan(Fault("rollout.generate", rank=1, call=7))
    found = run(ground, *TWO_GENERATE, *STEPS, *more, *keys, name=f"turns{staleness}")
    check_whole(found)
    assert attempts(found) and set(attempts(found)) == {1}
    assert max(step["async/version_diff/max"] for step in found.metrics()) <= staleness
    assert min(step["episodes/turns"] for step in found.metrics()) > 2

    if staleness == 0:
        alone = ground.run("grpo", *STEPS, *more, *keys, name="turns-alone")
        assert distance(found.weights(4), alone.weights(4)) < 1e-6
