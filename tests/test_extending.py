"""One file and one line of a table add a part of each kind: done to a copy of the package, in which a run then goes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.runs import Playground

SOURCE = Path(__file__).parent.parent / "src" / "distflow"


class Part(NamedTuple):
    """A new part. line: for `table`, in the file of that table. code: of `file`; it calls `seen()` when it is used."""

    file: str
    table: str
    line: str
    code: str


PARTS = {
    "estimator": Part(
        "algorithms/advantages/mine.py",
        "builtin_names.py ESTIMATORS",
        '"mine": Estimator("the reward itself", "distflow.algorithms.advantages.mine:compute_mine_advantage"),',
        """
from distflow.algorithms.registry import register_adv_est

@register_adv_est("mine", scope="sample")
def compute_mine_advantage(token_level_rewards, response_mask):
    seen()
    rewards = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return rewards, rewards
""",
    ),
    "loss": Part(
        "algorithms/losses/mine.py",
        "builtin_names.py POLICY_LOSSES",
        '"mine": PolicyLoss("plain policy gradient", "distflow.algorithms.losses.mine:compute_mine_loss"),',
        """
from distflow.algorithms.registry import register_policy_loss

@register_policy_loss("mine")
def compute_mine_loss(log_probs, advantages, loss_mask):
    seen()
    return -log_probs * advantages, {}
""",
    ),
    "reward": Part(
        "rewards/mine_reward.py",
        "builtin_names.py REWARDS",
        '"mine": Reward("an odd number of characters", "distflow.rewards.mine_reward:compute_score"),',
        """
from distflow.rewards.score import Case

CASES = (Case("odd", None, True), Case("even", None, False))

def compute_score(solution_str):
    seen()
    return len(solution_str) % 2
""",
    ),
    "rollout engine": Part(
        "rollout/mine.py",
        "builtin_names.py ROLLOUT_ENGINES",
        '"mine": Entry("as hf", "distflow.rollout.mine:MineEngine"),',
        """
from distflow.rollout.hf import HFEngine

class MineEngine(HFEngine):
    def __init__(self, model, tokenizer, *, version, shares_weights, max_num_seqs):
        seen(max_num_seqs)
        super().__init__(model, tokenizer, version=version, shares_weights=shares_weights)
""",
    ),
    "train engine": Part(
        "training/mine.py",
        "builtin_names.py TRAIN_ENGINES",
        '"mine": Entry("as torch", "distflow.training.mine:MineEngine"),',
        """
from distflow.training.torch_engine import TorchTrainEngine

class MineEngine(TorchTrainEngine):
    def train_step(self, batch, loss_fn):
        seen()
        return super().train_step(batch, loss_fn)
""",
    ),
    "tracker": Part(
        "observe/tracker_mine.py",
        "builtin_names.py TRACKERS",
        '"mine": Tracker("counts steps", "distflow.observe.tracker_mine:MineTracker"),',
        """
class MineTracker:
    def __init__(self, run):
        self.run = run

    def log(self, step, values):
        seen(step, self.run.experiment)

    def close(self):
        pass
""",
    ),
    "pipeline": Part(
        "pipelines/mine.py",
        "builtin_names.py PIPELINES",
        '"mine": BuiltinPipeline("as grpo", "distflow.pipelines.mine:mine_pipeline"),',
        """
from distflow.graph import Pipeline
from distflow.pipelines.grpo import group_relative

def mine_pipeline(config):
    seen()
    return group_relative(Pipeline("mine_pipeline"), config)
""",
    ),
    "command": Part(
        "commands/greet.py",
        "cli.py COMMANDS",
        '"greet": Command("say hello", "distflow.commands.greet"),',
        """
def add_greet_arguments(parser):
    parser.add_argument("whom")

def run_greet(arguments):
    seen(arguments.whom)
    return 0
""",
    ),
}
SEEN = """
def seen(*what):
    with open({group_recorder!r}, "a") as file:
        print({kind!r}, *what, file=file)
"""
CHOSEN = (
    "dag.pipeline=mine",
    "algorithm.adv_estimator=mine",
    "actor_rollout_ref.actor.policy_loss=mine",
    "actor_rollout_ref.actor.strategy=mine",
    "actor_rollout_ref.rollout.name=mine",
    "actor_rollout_ref.rollout.max_num_seqs=7",
    "reward.functions={default: [mine]}",
    "trainer.logger=[mine]",
    "trainer.experiment_name=extended",
    "trainer.total_training_steps=1",
)


def add(part: Part, kind: str, package: Path, group_recorder: Path) -> None:
    """One new file, and one new line at the head of a table."""
    assert not (package / part.file).exists()
    (package / part.file).write_text(SEEN.format(group_recorder=str(group_recorder), kind=kind) + part.code)
    file, table = part.table.split()
    lines = (package / file).read_text().split("\n")
    head = next(number for number, line in enumerate(lines) if line.startswith(f"{table}: dict["))
    lines.insert(head + 1, f"    {part.line}")
    (package / file).write_text("\n".join(lines))


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the parts that were added said while a run chose them all."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(SOURCE, folder / "src" / "distflow")  # with what is compiled, which holds for files that stay
    group_recorder = folder / "witness.txt"
    for kind, part in PARTS.items():
        add(part, kind, folder / "src" / "distflow", group_recorder)
    overrides = Playground(folder).overrides("run", *CHOSEN, "~custom_reward_function.path")
    for arguments in (["train", "grpo", *overrides], ["greet", "world"]):
        done = subprocess.run(
            [sys.executable, "-m", "distflow", *arguments],
            env={**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    return group_recorder.read_text().splitlines()


@pytest.mark.parametrize("kind", PARTS)
def test_one_file_and_one_line_add(kind: str, witnessed: list[str]) -> None:
    said = {"rollout engine": " 7", "tracker": " 1 extended", "command": " world"}.get(kind, "")
    assert f"{kind}{said}" in witnessed
