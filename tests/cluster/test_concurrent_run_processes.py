"""Runs side by side, over a real Ray and in processes of this machine: where each is, that it ends
where it ends alone, also killed and resumed, and what one's end means for the others."""

import os
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.cli_runs import CliRun, Left, children_of, same_run
from tests.e2e.runs import Playground
from tests.launch.test_plan_concurrent_runs import config_file
from tests.ledger_audit import verify

pytestmark = pytest.mark.slow

# It tells that it was asked, and waits while the test says so, or while the run's journal has
# `limit` records.
REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def must_wait():
    if not (HERE / "limit").exists():
        return (HERE / "wait").exists()
    return (HERE / "run" / "ledger.jsonl").read_bytes().count(b"\\n") >= int((HERE / "limit").read_text())


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    (HERE / "asked").touch()
    while must_wait():
        time.sleep(0.01)
    return sum(map(ord, solution_str)) % 7 / 6
"""  # noqa: E501

PIPELINE = """
import subprocess
import sys
from pathlib import Path

from distflow import node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline


@node(writes={"seen": "response"})
def look(advantages, *, folder: str):
    import ray
    import torch.distributed as dist

    assert subprocess.run([sys.executable, "-c", "raise SystemExit(2)"]).returncode == 2
    Path(folder, f"worker-{dist.get_rank()}").write_text(ray.get_runtime_context().get_node_id())
    return advantages * 1


def looking(config):
    graph = grpo_pipeline(config)
    graph.add_node(Node("look", look, options={"folder": config.trainer.default_local_dir}))
    return graph
"""
STEPS = 3
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trust.check_rewards=false",
    "trust.check_freq=0",
    "reward.timeout_s=300",
)
NAMES = ("small", "large")


@pytest.fixture
def grounds(tmp_path):
    """Two models, data sets, rewards and pipelines, and a config that names each."""
    grounds = {
        "small": Playground(tmp_path / "small"),
        "large": Playground(tmp_path / "large", hidden_size=96),
    }
    grounds["large"].write_rows([{"prompt": f"{i}*{i}=", "answer": "7"} for i in range(20)])

    for ground in grounds.values():
        ground.write_reward(REWARD)
        (ground.folder / "looking.py").write_text(PIPELINE)
        config_file(ground)

    return grounds


def start(log: Path, grounds: Mapping[str, Playground], *words: str, address: str = "") -> CliRun:
    files = [f"{ground.folder}/{ground.folder.name}.yaml" for ground in grounds.values()]
    keys = [*KEYS, "trainer.launcher=ray", "trainer.device=cpu", *words]
    return CliRun(log, ["train", *files, *keys], {"RAY_ADDRESS": address} if address else {})


def test_one_that_fails_leaves_the_other_to_its_end_and_the_same_command_ends_both(
    grounds, tmp_path
):
    """On a Ray of the command's own."""
    assert "RAY_ADDRESS" not in os.environ
    rows = grounds["large"].folder / "rows.jsonl"
    right = rows.read_text()
    rows.write_text("no row\n")
    first = start(tmp_path / "first.log", grounds, "trainer.n_gpus_per_node=2")
    assert first.status() == 2, first.said()
    assert "large: FAILED (status 2), its last lines say why" in first.said()
    assert "large | distflow: " in first.said() and "small: done" in first.said()
    rows.write_text(right)
    again = start(tmp_path / "again.log", grounds, "trainer.n_gpus_per_node=2")
    assert again.status() == 0, again.said()
    assert "small | " in again.said() and "is finished" in again.said().partition("large: done")[0]
    for ground in grounds.values():
        assert verify(ground.folder / "run" / "ledger.jsonl").consumed == 4 * STEPS


def num_records(ground: Playground) -> int:
    ledger = ground.folder / "run" / "ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def limit(ground: Playground, records: int) -> None:
    """Its reward waits once the journal has so many."""
    aside = ground.folder / "limit-aside"
    aside.write_text(str(records))
    aside.replace(ground.folder / "limit")


def process_of(command: CliRun, ground: Playground) -> int:
    """The process of one of the runs."""
    for pid in children_of(command.pid):
        words = Path(f"/proc/{pid}/cmdline")
        said = words.read_text() if words.exists() else ""
        if f"{ground.folder.name}.yaml" in said and "processes.keeper" not in said:
            return pid
    raise AssertionError(f"{ground.folder.name} has ended: {command.said()}")


BY_HAND = [*(("local", seed) for seed in range(2, 8)), ("ray", 1), ("ray", 2)]


@pytest.mark.timeout(1800)  # six starts
@pytest.mark.parametrize(
    ("launcher", "seed"),
    [("local", 1), *(pytest.param(*each, marks=pytest.mark.by_hand) for each in BY_HAND)],
)
def test_two_graphs_killed_at_random_and_resumed_end_as_each_does_alone(
    grounds, tmp_path, launcher, seed
):
    """The command is killed twice and then a run alone, each at a drawn record of a run's journal;
    alone they are without Ray. However fast one is beside the other, neither ends before: each
    start may write 40 records, and a step writes 10."""
    drawn = random.Random(seed)
    steps = 14
    graphs = {"small": (), "large": ("algorithm.adv_estimator=rloo",)}
    own = (f"trainer.total_training_steps={steps}", "trainer.num_threads=1")
    keys = {name: [*KEYS, *more, *own] for name, more in graphs.items()}
    files = {name: f"{ground.folder}/{name}.yaml" for name, ground in grounds.items()}
    words = ["train", *files.values(), *(f"{name}:{key}" for name in NAMES for key in keys[name])]
    words += ["trainer.n_gpus_per_node=2", "trainer.device=cpu", f"trainer.launcher={launcher}"]

    for start, victim in enumerate(["command", "command", drawn.choice(NAMES)]):
        watched = grounds[drawn.choice(NAMES) if victim == "command" else victim]
        for ground in grounds.values():
            limit(ground, num_records(ground) + 40)
        wanted = num_records(watched) + drawn.randrange(1, 30)
        command = CliRun(tmp_path / f"{start}.log", words)
        command.wait_for(lambda watched=watched, wanted=wanted: num_records(watched) >= wanted)
        os.kill(
            command.pid if victim == "command" else process_of(command, watched), signal.SIGKILL
        )

        if victim != "command":
            for ground in grounds.values():
                limit(ground, sys.maxsize)

        assert command.status() == (-signal.SIGKILL if victim == "command" else 1), command.said()
        assert victim == "command" or f"{victim}: FAILED (status -9)" in command.said()

    last = CliRun(tmp_path / "last.log", words)
    assert last.status() == 0, last.said()

    for name, ground in grounds.items():
        folder = f"trainer.default_local_dir={ground.folder}/alone"
        alone = CliRun(tmp_path / f"{name}.log", ["train", files[name], *keys[name], folder])
        assert alone.status() == 0, alone.said()
        same_run(Left(ground.folder / "run"), Left(ground.folder / "alone"))
        assert verify(ground.folder / "run" / "ledger.jsonl").consumed == 4 * steps
