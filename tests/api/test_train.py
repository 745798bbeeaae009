"""`distflow.train`: rows, a reward and callbacks of Python make the run that files would make."""

import asyncio
import json
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import distflow
from distflow.cli import main
from distflow.errors import ConfigError, UserError
from tests.api.reward_results import lengths
from tests.api.small import ROWS, TINY, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="module")
def told():
    return []


def trained(folder: Path, told: list[tuple]) -> distflow.Run:
    """As from a notebook, whose loop runs while it trains."""

    def failing(step: int, metrics: dict) -> None:
        random.random()
        told.append(("step", step, metrics))
        raise RuntimeError("no such plot")

    async def cell() -> distflow.Run:
        return distflow.train(
            TINY,
            small(folder, trainer__val_before_train=True, trainer__test_freq=1),
            data=iter(ROWS),
            val_data=ROWS[:2],
            reward=lambda solution_str, ground_truth: lengths(solution_str, ground_truth),
            on_step=failing,
            on_validation=lambda step, metrics: told.append(("validation", step, metrics)),
            on_save=lambda step, path: told.append(
                ("save", step, path, (path / "manifest.json").exists())
            ),
        )

    before = (signal.getsignal(signal.SIGINT), random.getstate(), torch.get_rng_state())
    made = asyncio.run(cell())
    assert (signal.getsignal(signal.SIGINT), random.getstate()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])

    return made


@pytest.fixture(scope="module")
def run(folder, told):
    return trained(folder, told)


@pytest.fixture
def own(tmp_path):
    """For those that go on with it."""
    return trained(tmp_path / "run", [])


def test_what_was_given_is_what_it_trained_on(run, folder):
    assert run.folder == folder.resolve() and run.status == "finished" and run.num_steps == 2
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    samples = run.samples(split="train")
    assert len(samples) == 2 * 2 * 2

    for sample in samples:
        assert sample["ground_truth"] == answers[sample["prompt"]]
        assert sample["score"] == lengths(sample["response"], sample["ground_truth"])["score"]


def test_callbacks_are_told_and_one_that_raises_ends_nothing(run, told):
    order = [entry[:2] for entry in told]
    assert [entry for entry in order if entry[0] != "save"] == [
        ("validation", 0),
        *[(kind, step) for step in (1, 2) for kind in ("validation", "step")],
    ]
    assert all(order.index(("step", step)) < order.index(("save", step)) for step in (1, 2))
    assert all(entry[2]["reward/mean_score"] >= 0 for entry in told if entry[0] == "step")
    assert all("val_correct/all/mean" in entry[2] for entry in told if entry[0] == "validation")
    assert [entry[2:] for entry in told if entry[0] == "save"] == [
        (path, True) for path in run.checkpoints
    ]
    told_of = [
        event["message"]
        for event in run.events("warning")
        if event["message"].startswith("on_step: ")
    ]
    assert len(told_of) == 2 and len(set(told_of)) == 1
    assert "on_step: failing raised RuntimeError: no such plot (at test_train.py:" in told_of[0]


@pytest.mark.slow
def test_the_command_line_goes_on_with_it(own, capsys):
    assert main(["train", str(own.folder / "config.yaml"), "trainer.total_training_steps=3"]) == 0
    assert own.num_steps == 3 and "resumed from step-000002" in capsys.readouterr().out
    evaluated = ["eval", str(own.folder / "config.yaml"), "data.val_max_samples=1"]
    assert main(evaluated) == 0


@pytest.mark.slow
def test_a_resume_reads_the_rows_it_began_with_and_tells_of_another_reward(own, capsys):
    def other(solution_str: str) -> float:
        return float(len(solution_str))

    with pytest.raises(UserError, match="different rows"):
        distflow.train(TINY, small(own.folder), data=ROWS[:3], reward=other)
    capsys.readouterr()
    same = small(own.folder, trainer__val_before_train=True, trainer__test_freq=1)
    assert distflow.train(TINY, same, data=iter([]), val_data=ROWS[:2], reward=other).num_steps == 2
    assert (
        "It was trained with different code than the call gives now (reward_custom)"
        in capsys.readouterr().out
    )
    again = distflow.train(
        TINY,
        small(
            own.folder,
            trainer__total_training_steps=3,
            trainer__val_before_train=True,
            trainer__test_freq=1,
        ),
        data=iter([]),
        val_data=ROWS[:2],
        reward=other,
    )
    assert again.num_steps == 3
    (changed,) = [
        event["message"]
        for event in again.events("warning")
        if "code_of_reward" in event["message"]
    ]
    assert "code_of_reward_custom was" in changed
    assert {row["score"] for row in again.samples(step=3, split="train")} <= {
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    }


def test_a_signal_saves_and_the_process_goes_on(tmp_path):
    stopped = distflow.train(
        TINY,
        small(tmp_path / "run", trainer__total_training_steps=9, trainer__save_freq=9),
        data=ROWS,
        reward=lengths,
        on_step=lambda step, metrics: signal.raise_signal(signal.SIGINT),
    )
    assert stopped.status == "stopped" and stopped.num_steps == 1
    assert [path.name for path in stopped.checkpoints] == ["step-000001"]


@pytest.mark.slow
def test_it_trains_on_another_thread_than_the_main_one(tmp_path):
    made: list[distflow.Run] = []

    def work() -> None:
        lines = [
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trust.check_freq=0",
        ]
        made.append(
            distflow.train(str(TINY), lines, data=str(write(tmp_path, ROWS)), reward=batched)
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made[0].status == "finished"
    assert {row["score"] for row in made[0].samples()} <= {float(i) for i in range(8)}


def batched(solution_strs: list[str]) -> list[float]:
    return [float(sorted(solution_strs).index(text)) for text in solution_strs]


def write(folder: Path, rows: list[dict]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


MODEL = {"actor_rollout_ref.model.path": "builtin:tiny-arithmetic", "data.train_batch_size": 2} | {
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": ["1+1="]}, "data: row 1 .* str"),
        ({"val_data": {"prompt": ["1+1="]}}, "val_data is a dict "),
        (
            {"data": [{"prompt": "1+1=", "solution": "2"}], "reward": None},
            "column 'answer'",
        ),
        (
            {"reward": lambda reply: 0},
            r"reward: <lambda> takes \(reply\): ",
        ),
        ({"data": 5}, "data is of type int: "),
        ({"resume": True}, "resume=True: write 'auto', 'never'"),
        ({"reward": "math"}, "reward is 'math': "),
        ({"reward": threading.Lock().acquire}, "reward: acquire .* signature"),
        ({"on_step": lambda step: 0}, "on_step must be "),
        ({"overrides": {"data.trian_batch_size": 8}}, r"data.trian_batch_size \(given\)"),
        ({"overrides": {"trainer.seed": object()}}, "trainer.seed is <object"),
        ({"overrides": {"reward.functions": {"default": ["math"]}}}, r"(?m)^  reward \(given\)$"),
        ({"overrides": 3}, "overrides are 3: pass a dict"),
        (
            {"overrides": ["data.train_files=x.jsonl"]},
            r"data\.train_files is set, .* argument data=",
        ),
        ({"overrides": ["custom_reward_function.path=x.py"]}, "argument reward="),
        (
            {
                "preset_or_config": "sft",
                "overrides": {**MODEL, "actor_rollout_ref.model.init": "random"},
            },
            "pipeline sft ",
        ),
        ({"preset_or_config": "gpro"}, r"(?s)'gpro' .* grpo\?"),
        ({"reward": [lengths, lengths]}, "pass one function"),
        ({"preset_or_config": {"reward": lengths}}, "reward is a function: "),
        (
            {
                "overrides": {
                    "actor_rollout_ref.model.path": GPT2LMHeadModel(
                        GPT2Config(n_embd=4, n_layer=1, n_head=1)
                    )
                }
            },
            r"model\.path .* GPT2LMHeadModel: ",
        ),
        ({"preset_or_config": {"defaults": ["grpo", "ppo"]}}, "name the single preset"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = arguments.get("overrides", small(tmp_path / "run"))
    call = {
        "preset_or_config": TINY,
        "data": ROWS,
        "reward": lengths,
        **arguments,
        "overrides": overrides,
    }
    with pytest.raises(UserError, match=said) as raised:
        distflow.train(**call)
    assert (
        not list(tmp_path.glob("run/checkpoints/*"))
        and not (tmp_path / "run" / "metrics.jsonl").exists()
    )
    if isinstance(raised.value, ConfigError):
        assert not list(tmp_path.iterdir())
    assert raised.value._render_traceback_() == [f"{type(raised.value).__name__}: {raised.value}"]


def trl(prompts, completions, answer, **kwargs):
    assert isinstance(prompts[0], str) and kwargs["ground_truth"] == answer
    return [float(len(text) > len(truth)) for text, truth in zip(completions, answer, strict=True)]


@pytest.mark.slow
def test_a_reward_of_trl_is_taken_as_it_is(tmp_path):
    one_step = small(tmp_path / "run", trainer__total_training_steps=1)
    run = distflow.train(TINY, one_step, data=ROWS, reward=trl)
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    samples = run.samples(split="train")
    assert samples and [sample["errors"] for sample in samples] == [None] * len(samples)
    assert all(s["score"] == float(len(s["response"]) > len(answers[s["prompt"]])) for s in samples)


def test_a_reward_that_fails_is_told_before_the_model_is_loaded(tmp_path, capsys):
    def fails(completions, answer):
        return [
            float(each[-1]["content"] == wanted)
            for each, wanted in zip(completions, answer, strict=True)
        ]

    with pytest.raises(
        UserError, match=r"fails .*TypeError: .*data\.prompt_format=chat.*line \d+\)"
    ):
        distflow.train(
            TINY, small(tmp_path / "run", trust__check_rewards=True), data=ROWS, reward=fails
        )

    assert not (tmp_path / "run" / "events.jsonl").exists(), "no run has begun"
    with pytest.raises(UserError, match="takes 'trainer_state'"):
        distflow.train(
            TINY,
            small(tmp_path / "run"),
            data=ROWS,
            reward=lambda completions, trainer_state: [1.0] * len(completions),
        )


@pytest.mark.slow
def test_several_at_once_each_with_its_own_rows_and_functions(tmp_path):
    squares = [{"prompt": f"{a}*{a}=", "answer": str(a * a)} for a in range(1, 9)]

    def half(token_level_rewards, response_mask):
        return 0.5 * token_level_rewards, token_level_rewards

    def several(*names: str) -> dict[str, distflow.Run]:
        given = {
            "sums": {"data": iter(ROWS), "reward": lambda solution_str: float(len(solution_str))},
            "squares": {"data": squares, "reward": lengths, "advantage": half},
        }
        for name, arguments in given.items():
            arguments |= {
                "preset_or_config": TINY,
                "overrides": small(tmp_path / name, trainer__num_threads=1),
            }

        return distflow.train_several(
            {name: given[name] for name in names},
            {"trainer.n_gpus_per_node": len(names), "trainer.device": "cpu"},
        )

    runs = several("sums", "squares")
    assert {name: (run.folder, run.status) for name, run in runs.items()} == {
        name: (tmp_path / name, "finished") for name in ("sums", "squares")
    }
    assert all(
        sample["score"] == len(sample["response"]) for sample in runs["sums"].samples(split="train")
    )
    assert {s["prompt"] for s in runs["squares"].samples(split="train")} <= {
        row["prompt"] for row in squares
    }
    assert (
        runs["squares"]
        .config["algorithm"]["adv_estimator"]
        .endswith("squares/data/advantage.pkl:half")
    )
    again = several("sums")
    assert again["sums"].num_steps == 2 and len(again["sums"].events("checkpoint")) == 2, (
        "it was done"
    )
