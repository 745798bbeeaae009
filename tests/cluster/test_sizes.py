"""Nothing large reaches the driver or the coordinator, however long prompts and answers are; and no
more of it waits in shared memory than may."""

import json
from pathlib import Path

import pytest

from distflow.cluster import supervisor
from distflow.cluster.ray_launcher import launch_ray
from distflow.scheduling import ledger
from tests.cluster.measured_actors import SIZES, MeasuredCoordinator, MeasuredWorker
from tests.e2e.cli_runs import CliRun
from tests.e2e.runs import Playground
from tests.ledger_audit import verify

pytestmark = pytest.mark.slow

MOST = 64 * 1024
STORE = 80 * 10**6

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(map(ord, solution_str))
    if number % 3 == 0:
        raise ValueError("why not")
    return number % 7 / 6
"""


KEYS = (
    "data.max_prompt_length=1600",
    "data.max_response_length=200",
    "reward.max_error_rate=1",
    "trust.check_rewards=false",
    "async.max_staleness=1",
    "trainer.launcher=ray",
    "trainer.allocation='embedded:d1+torch:d2'",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
)


@pytest.fixture
def ground(tmp_path, on_ray, monkeypatch):
    monkeypatch.setattr(supervisor, "CoordinatorActor", MeasuredCoordinator)
    monkeypatch.setattr(supervisor, "WorkerActor", MeasuredWorker)
    ground = Playground(tmp_path, max_position_embeddings=2048)
    ground.write_rows(
        [
            {"prompt": f"{i}" * 700 + "=", "answer": "7", "notes": f"{i} " * 9000}
            for i in range(10, 22)
        ]
    )
    ground.write_reward(REWARD)

    return ground


def sizes(ground: Playground) -> dict[str, int]:
    """The largest by what it was."""
    found: dict[str, int] = {}
    for line in (ground.folder / SIZES).read_text().splitlines():
        what, num_bytes = json.loads(line)
        found[what] = max(found.get(what, 0), num_bytes)
    return found


def test_no_object_above_64_kb_reaches_driver_or_coordinator(ground):
    _, spec = ground.spec(
        "grpo", *KEYS, f"data.val_files={ground.folder}/rows.jsonl", "trainer.test_freq=3"
    )
    outcome = launch_ray(spec)
    found = sizes(ground)
    assert outcome.steps == 3
    assert {name for name, num_bytes in found.items() if num_bytes > MOST} == set()
    asked = {what.partition(".")[2] for what in found}
    assert {
        "take",
        "end",
        "release",
        "resume_point",
        "messages",
        "add_message",
        "build",
        "run",
    } <= asked
    live = ground.folder / "run" / "checkpoints" / "step-000002" / "live.safetensors"
    assert live.stat().st_size > 4 * MOST, "the groups themselves are large"


@pytest.mark.faults
def test_a_store_that_could_not_hold_all_that_may_run_ahead_is_never_full(tmp_path):
    """12 groups of 8 MB may be under way before the first step. Ray has 80 MB for objects, and is
    to move none to the disk. By default half of it is for groups: a step's."""
    ground = Playground(tmp_path, max_position_embeddings=2048)
    ground.write_rows(
        [{"prompt": f"{i}=", "answer": "7", "notes": f"{i} " * 650_000} for i in range(10, 22)]
    )
    small = {
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": f"{STORE}",
        "RAY_automatic_object_spilling_enabled": "0",
    }
    keys = ground.overrides("run", *KEYS, "async.max_staleness=2")
    run = CliRun(tmp_path / "run.log", ["train", "grpo", *keys], small)
    assert run.status() == 0, run.said()
    journal = tmp_path / "run" / "ledger.jsonl"
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    live = json.loads((saved / "run.json").read_text())["coordinator"]["live"]
    group = (saved / "live.safetensors").stat().st_size / sum(each["complete"] for each in live)
    assert 12 * group > STORE, "all of them would not have fitted"
    assert verify(journal).consumed == 12 and most_live(journal) * group < STORE


def most_live(journal: Path) -> int:
    """Groups that had begun and that no step had consumed."""
    live = set[int]()
    most = 0
    for _, record in ledger.timeline(journal):
        if record["kind"] == "issued":
            live.add(int(record["group_id"]))
        elif record["kind"] == "dropped":
            live.remove(int(record["group_id"]))
        elif record["kind"] == "consumed":
            live -= {int(number) for number in record["group_ids"]}

        most = max(most, len(live))

    return most
