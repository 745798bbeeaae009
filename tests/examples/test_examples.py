"""Every example runs as it is and does what it says."""

import runpy
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from distflow.data.batch import Batch
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import notes
from tests.user_code import forgotten

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    with forgotten("examples"):
        yield


def train(name: str, run_dir: Path, *overrides: str) -> Batch:
    """Two steps of an example; all columns of the first."""
    short = [
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        f"trainer.default_local_dir={run_dir}",
    ]
    assert main(["train", f"examples/{name}.yaml", *short, *overrides]) == 0
    assert [record.step for record in read_metrics(run_dir) if record.kind == "train"] == [1, 2]
    assert (run_dir / "report.html").is_file()

    return Batch.load(run_dir / "tokens" / "000001.safetensors")


def test_reward(tmp_path):
    train("custom_reward", tmp_path)
    for sample in read_samples(tmp_path, 1):
        assert set(sample["reward_parts"]) == {"custom", "exact_match"}
        digits = sum(character.isdigit() for character in sample["response"])
        if digits and sample["response"] != sample["ground_truth"]:
            assert sample["score"] == pytest.approx(0.5 * digits / len(sample["response"]))


def test_pipeline(tmp_path):
    batch = train("custom_pipeline", tmp_path)
    charged = batch["token_level_scores"] - 0.02 * batch["response_mask"]
    assert torch.allclose(batch["token_level_rewards"], charged)
    assert "values" not in batch and "old_log_probs" not in batch


def test_two_turns(tmp_path):
    batch = train("two_turns", tmp_path)
    for mask, length in zip(
        batch["response_mask"], batch.lengths("response").tolist(), strict=True
    ):
        edges = torch.nn.functional.pad(mask[:length].int(), (1, 1)).diff().nonzero()[:, 0].tolist()
        assert len(edges) == 4 and edges[0] == 0 and edges[2] - edges[1] == 2, (
            "two turns, given tokens between"
        )


@pytest.mark.slow
def test_any_agent(tmp_path):
    batch = train(
        "any_agent", tmp_path, "trainer.val_before_train=false", "actor_rollout_ref.rollout.n=4"
    )
    assert {*batch["scores"].tolist()} <= {0.0, 1.0} and not any(batch["reward_errors"])


@pytest.mark.slow
def test_multi_turn(tmp_path):
    batch = train(
        "multi_turn", tmp_path, "trainer.val_before_train=false", "actor_rollout_ref.rollout.n=4"
    )
    for answer, text, score in zip(
        batch["ground_truth"], batch["responses"], batch["scores"].tolist(), strict=True
    ):
        assert score == float(text == answer)


@pytest.mark.slow
def test_two_agents(tmp_path):
    batch = train(
        "two_agents", tmp_path, "trainer.val_before_train=false", "actor_rollout_ref.rollout.n=4"
    )
    assert [[name for name, _ in forks] for forks in batch["forks"]] == [["bob"]] * len(batch)

    for said, score in zip(batch["conversation"], batch["scores"].tolist(), strict=True):
        chosen = {turn["text"] for turn in said if turn["owner"] == "policy"}
        assert score == len(chosen & {"1", "2"}) / 2


@pytest.mark.slow
def test_agents_with_policies(tmp_path):
    batch = train(
        "solver_checker",
        tmp_path,
        "trainer.val_before_train=false",
        "actor_rollout_ref.rollout.n=4",
    )
    assert [[name for name, _ in forks] for forks in batch["forks"]] == [["checker"]] * len(batch)

    for said, parts, answer in zip(
        batch["conversation"], batch["reward_parts"], batch["ground_truth"], strict=True
    ):
        solved, judged = (turn["text"] for turn in said if turn["owner"] == "policy")
        assert parts == {
            "solver": solved == answer,
            "checker": judged == ("1" if solved == answer else "0"),
        }

    assert "policies/checker/loss" in read_metrics(tmp_path)[-1].values


def rewards(run_dir: Path, *command: str) -> list[float]:
    """The mean reward of each step of a whole run."""
    assert main([*command, f"trainer.default_local_dir={run_dir}"]) == 0
    return [
        float(row.values["reward/mean_score"])
        for row in read_metrics(run_dir)
        if row.kind == "train"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["multi_turn", pytest.param("any_agent", marks=pytest.mark.by_hand), "two_agents"]
)
def test_the_agents_learn(name, tmp_path):
    found = rewards(
        tmp_path / "run", "train", f"examples/{name}.yaml", "trainer.total_training_steps=40"
    )
    assert sum(found[:3]) / 3 < 0.2 and sum(found[-3:]) / 3 > 0.45, found


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_model_learns_to_use_a_tool(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "tool_use"
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / "tool_use.py"))

    start = f"actor_rollout_ref.model.path={folder}/start"
    sft = [f"data.train_files={folder}/sft.jsonl", start, f"trainer.default_local_dir={folder}/sft"]
    assert main(["sft", "examples/tool_use_sft.yaml", *sft]) == 0
    assert main(["export", f"{folder}/sft", "--to", f"{folder}/model"]) == 0
    files = [
        f"data.{name}_files={folder}/{data}.jsonl"
        for name, data in (("train", "rl"), ("val", "val"))
    ]
    learned = f"actor_rollout_ref.model.path={folder}/model"
    short = "trainer.total_training_steps=8"
    found = rewards(folder / "grpo", "train", "examples/tool_use.yaml", *files, learned, short)
    assert found[0] < 0.4 and sum(found[-3:]) / 3 > 0.55, found
    calls = [
        row.values["tool/calculator/calls"]
        for row in read_metrics(folder / "grpo")
        if row.kind == "train"
    ]
    assert calls[-1] > 1.5 * calls[0]


def test_advantage(tmp_path, capsys):
    batch = train("custom_advantage", tmp_path)
    assert "advantages: median(scale=0.5)" in capsys.readouterr().out
    scores = batch["token_level_scores"].sum(-1)

    for group in batch["group_index"].unique():
        members = batch["group_index"] == group
        expected = 0.5 * (scores[members] - scores[members].median())
        assert torch.allclose(batch["advantages"][members, 0], expected)


def test_loss_in_our_signature(tmp_path):
    train("custom_loss", tmp_path)
    ratios = [
        record.values["actor/ratio"] for record in read_metrics(tmp_path) if record.kind == "train"
    ]
    assert all(0.9 < ratio < 1.1 for ratio in ratios)


def test_loss_in_the_signature_of_the_seed(tmp_path):
    other = [
        "actor_rollout_ref.actor.policy_loss=my_custom_loss",
        "~actor_rollout_ref.actor.policy_loss_kwargs",
    ]
    train("custom_loss", tmp_path, *other)
    assert not [note for note in notes(tmp_path, "warning") if "does not aggregate" in note]
    (first, _) = [record.values for record in read_metrics(tmp_path) if record.kind == "train"]
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"} <= set(
        first
    )


@pytest.mark.slow
def test_own_loop(tmp_path):
    """Its reward rises: from a tenth of digits to a third and more."""
    main_of_the_loop = runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"]
    run = main_of_the_loop(
        **{"trainer.total_training_steps": 12, "trainer.default_local_dir": str(tmp_path / "run")}
    )
    scores = [row["reward/mean_score"] for row in run.metrics("train")]
    assert len(scores) == 12 and scores[0] < 0.15 and scores[-1] > 0.3
    staleness = [row["async/version_diff/max"] for row in run.metrics("train")]
    assert max(staleness) == 1
    assert run.status == "finished"


def rewards_after_sft(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, sft: str = "", *overrides: str
) -> list[float]:
    """Of the example's run, which begins with the model that its script makes, after supervised
    fine-tuning."""
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(folder)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    folder = folder / "runs" / name
    start = f"actor_rollout_ref.model.path={folder}/start"
    to = f"trainer.default_local_dir={folder}/sft"
    assert main(["sft", f"examples/{sft or name}_sft.yaml", start, to, *overrides]) == 0
    learned = f"actor_rollout_ref.model.path={folder}/sft"
    found = rewards(folder / "grpo", "train", f"examples/{name}.yaml", learned)
    assert not notes(folder / "grpo", "warning")

    return found


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_model_learns_to_name_colours(tmp_path, monkeypatch):
    found = rewards_after_sft("images", tmp_path, monkeypatch)
    assert sum(found[:3]) / 3 < 0.4 and sum(found[-3:]) / 3 > 0.7, found


ACTION_KEYS = "actor_rollout_ref.rollout.workflow_kwargs.actions"
DENOISED = (
    *(
        "data.max_response_length=20",
        f"{ACTION_KEYS}.head=flow_sde",
        f"+{ACTION_KEYS}.denoising_steps=2",
    ),
    *(f"+{ACTION_KEYS}.bins=8", "actor_rollout_ref.actor.optim.lr=1e-3"),
)


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("overrides", [(), DENOISED], ids=["gaussian", "flow_sde"])
def test_the_policy_learns_continuous_moves_from_random_weights(tmp_path, monkeypatch, overrides):
    monkeypatch.setenv("ACTION_TOKENS", "640" if overrides else "8")
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / "acting_continuous.py"), run_name="__main__")

    start = f"actor_rollout_ref.model.path={tmp_path}/runs/acting_continuous/start"
    found = rewards(
        tmp_path / "grpo", "train", "examples/acting_continuous.yaml", start, *overrides
    )
    assert not notes(tmp_path / "grpo", "warning")
    assert abs(sum(found[:3]) / 3) < 0.15 and sum(found[-10:]) / 10 > 0.6, found


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_policy_learns_to_reach_targets(tmp_path, monkeypatch):
    found = rewards_after_sft("acting", tmp_path, monkeypatch)
    assert sum(found[20:30]) / 10 > 0.75 and sum(found[-10:]) / 10 > 0.8, found
    folder = tmp_path / "runs" / "acting"
    swap = "+actor_rollout_ref.rollout.workflow_kwargs.env_kwargs={swap: true}"
    assert main(["eval", str(folder / "grpo"), swap, "--trust-code", f"--to={folder}/swapped"]) == 0
    (swapped,) = read_metrics(folder / "swapped")
    assert swapped.values["val_correct/all/mean"] < 0.3, "it goes where the instruction says"


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_policy_learns_to_reach_with_a_robots_arm(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium_robotics")
    own = ("data.train_files=examples/fetch_reach.py:demonstrations", "data.max_response_length=9")
    found = rewards_after_sft(
        "fetch_reach", tmp_path, monkeypatch, "acting", *own, "trainer.total_epochs=1"
    )
    assert found[0] < 0.7 and sum(found[-10:]) / 10 > 0.88, found
