"""Estimators, losses and pipelines of a notebook or a file train as registered ones do."""

from pathlib import Path

import pytest

import distflow
from distflow.cli import main
from distflow.config import load_config
from distflow.errors import UserError
from tests.api.passed_functions import CELLS, REGISTERED, cells
from tests.api.reward_results import lengths
from tests.api.small import ROWS, TINY, small
from tests.user_code import forgotten

GAIN = "algorithm.adv_estimator_kwargs"


def advantages(run: distflow.Run) -> list[float]:
    """As the loss of the cells reports them."""
    return [row["actor/advantage"] for row in run.metrics("train")]


@pytest.mark.slow
def test_functions_of_cells_make_the_run_and_a_changed_one_is_reported_on_resume(tmp_path, capsys):
    own = cells()
    settings = small(tmp_path / "run", trainer__total_training_steps=1, trust__check_freq=1)
    passed = {"advantage": own["level"], "loss": own["plain"], "pipeline": own["counting"]}
    run = distflow.train(
        TINY, {**settings, GAIN: {"gain": 2.0}}, data=ROWS, reward=lengths, **passed
    )
    assert advantages(run) == pytest.approx([0.5])
    assert [row["rollout/rows"] for row in run.metrics("train")] == [4.0]
    assert all({"advantages", "loss"} <= {*own["passed"]} for own in run.events("checks"))
    other = cells(CELLS.replace("LEVEL = 0.25", "LEVEL = 0.75"))
    settings["trainer.total_training_steps"] = 2
    again = distflow.train(
        TINY,
        {**settings, GAIN: {"gain": 2.0}},
        data=ROWS,
        reward=lengths,
        **{**passed, "advantage": other["level"]},
    )
    assert advantages(again) == pytest.approx([0.5, 1.5])
    (changed,) = [
        event["message"] for event in again.events("warning") if "code_of" in event["message"]
    ]
    assert changed.startswith("code_of_algorithm.adv_estimator was")


@pytest.mark.slow
def test_what_a_cell_registered_is_seen_and_the_command_line_resumes_with_it(tmp_path):
    with forgotten():
        cells(CELLS + REGISTERED)
        settings = small(
            tmp_path / "run",
            trainer__total_training_steps=1,
            algorithm__adv_estimator="cells_level",
        )
        run = distflow.train(TINY, settings, data=ROWS, reward=lengths, loss=cells()["plain"])

    assert advantages(run) == pytest.approx([0.25])
    with forgotten():
        assert (
            main(["train", str(run.folder / "config.yaml"), "trainer.total_training_steps=2"]) == 0
        )

    assert advantages(run) == pytest.approx([0.25, 0.25])


@pytest.mark.slow
def test_a_file_is_named_by_the_config_and_not_run_unasked(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"print('the file runs')\n{CELLS}")
    chosen = [
        f"algorithm.adv_estimator={tmp_path}/mine.py:level",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    chosen += [
        f"actor_rollout_ref.actor.policy_loss={tmp_path}/mine.py:plain",
        "trainer.total_training_steps=1",
    ]
    chosen += ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    chosen += ["actor_rollout_ref.rollout.n=2", "data.max_response_length=4", "trust.check_freq=0"]
    assert main(["config", str(TINY), *chosen]) == 0
    said = capsys.readouterr()
    assert "the file runs" not in said.out and "--trust-code" in said.err
    with forgotten():
        assert main(["train", str(TINY), *chosen]) == 0
    assert (
        f"your code: algorithm.adv_estimator: {tmp_path}/mine.py:level" in capsys.readouterr().out
    )
    assert advantages(distflow.load_run(tmp_path / "run")) == pytest.approx([0.25])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("algorithm.adv_estimator=mine.py:levle", r"(?s)'mine\.py:levle' .*mine\.py:level$"),
        ("actor_rollout_ref.actor.policy_loss=none.py:plain", "none.py"),
        ("algorithm.adv_estimator=levle", "file.py:function"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_key(line, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CELLS)
    with pytest.raises(UserError, match=said) as raised:
        load_config(str(TINY), [line], needed={line.partition("=")[0]})
    assert line.partition("=")[0] in str(raised.value)


def scored(completions: list[str]) -> float:
    return 0.0


async def asks(chat, row):
    return len((await chat.ask(row.prompt)).token_ids)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"advantage": "grpo"},
            r"advantage is 'grpo': .* algorithm\.adv_estimator",
        ),
        ({"pipeline": dict}, "pipeline is <class 'dict'>: "),
        ({"loss": scored}, r"policy_loss: .*scored\) cannot be called: it takes no log_probs"),
        ({"advantage": scored}, "takes 'completions', "),
        (
            {"advantage": scored, "overrides": {"algorithm.adv_estimator": "gae"}},
            "argument advantage=",
        ),
        (
            {"reward": scored, "workflow": asks},
            "reward: .* pipeline calls it: ",
        ),
        (
            {"loss": scored, "overrides": {"dag.pipeline": "sft"}},
            "loss is given, .* pipeline sft ",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_a_model_is_loaded(
    arguments, said, tmp_path
):
    overrides = small(tmp_path / "run") | arguments.get("overrides", {})
    with pytest.raises(UserError, match=said):
        distflow.train(
            **{"preset_or_config": TINY, "data": ROWS, **arguments, "overrides": overrides}
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
