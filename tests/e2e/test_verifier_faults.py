"""Verifiers that hang, crash, exit, or run out of memory inside a run: masked, counted, and the run
goes on."""

import json
import re
import shutil

import pytest

from distflow import cli
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import Playground
from tests.patience import at_some_deadline
from tests.sparse_params import one_fast_in
from tests.user_code import forgotten

# One in four answers meets the fault, by their text: the same whatever the timing.
FAULTY = """
import os, signal, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(map(ord, solution_str))
    if number % 4 == 0:
        {fault}
    return number % 7 / 6
"""
FAULTS = {
    "hang": ("import re; re.match(r'(a+)+$', 'a' * 60 + 'b')", "timeouts"),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "errors"),
    "exit 0": ("os._exit(0)", "errors"),
    "memory": ("hoard = bytearray(2**40)", "errors"),
    "raise": ("raise KeyError('now and then')", "errors"),
    "NaN": ("return float('nan')", "errors"),
    "garbage": ("return 'very good'", "errors"),
}


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=8)


def train(ground: Playground, *overrides: str, preset: str = "grpo") -> int:
    cheap = ("trust.check_rewards=false", "trainer.total_epochs=1", "reward.num_workers=2")
    return cli.main(["train", preset, *ground.overrides("run", *cheap, *overrides)])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_verdict(ground, fault):
    code, counted = FAULTS[fault]
    ground.write_reward(FAULTY.format(fault=code))

    def check(deadline_s: float) -> None:
        shutil.rmtree(ground.folder / "run", ignore_errors=True)
        assert train(ground, "reward.max_error_rate=1", f"reward.timeout_s={deadline_s}") == 0
        costs_one_verdict(ground, counted)

    at_some_deadline(check, *((0.3, 3.0) if fault == "hang" else (30.0,)))


def costs_one_verdict(ground: Playground, counted: str) -> None:
    records = [record for record in read_metrics(ground.folder / "run") if record.kind == "train"]
    assert [record.step for record in records] == [1, 2]
    samples = [
        row for record in records for row in read_samples(ground.folder / "run", record.step)
    ]
    hit = [row for row in samples if sum(map(ord, row["response"])) % 4 == 0]
    assert 0 < len(hit) < len(samples)

    for row in samples:
        assert (row["errors"] is not None) == (row in hit)

        # no verdict: nothing is learned from it, and its group's mean does not know it
        if row in hit:
            assert (
                row["advantage"] == 0.0
                and row["reward_parts"] == {}
                and row["score"] is row["acc"] is None
            )
        else:
            assert row["score"] == pytest.approx(sum(map(ord, row["response"])) % 7 / 6)

    assert sum(record.values[f"reward/{counted}"] for record in records) >= len(hit)
    assert sum(record.values[f"reward/{counted}/custom"] for record in records) >= len(hit)
    scored = [row["score"] for row in samples if row["errors"] is None]
    assert min(record.values["reward/min"] for record in records) == pytest.approx(min(scored))


@pytest.mark.parametrize("preset", one_fast_in(2, ["ppo", "grpo"]))
def test_a_reward_that_always_fails_ends_the_run_with_its_own_words(ground, preset, capsys):
    """Also where groups of one sample are trained masked and nothing would be dropped."""
    ground.write_reward(
        FAULTY.format(fault="pass").replace("number % 7 / 6", "solution_str.no_such_method()")
    )
    size = "actor_rollout_ref.rollout.n=1" if preset == "ppo" else "actor_rollout_ref.rollout.n=4"
    assert train(ground, size, "trainer.total_epochs=4", preset=preset) == 2
    err = capsys.readouterr().err
    assert (
        "custom: AttributeError: 'str' object has no attribute 'no_such_method' (at reward.py:"
        in err
    )
    assert "custom_reward_function.path" in err and "Traceback" not in err
    events = [
        json.loads(line)
        for line in (ground.folder / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["kind"] for event in events][-2:] == ["error", "end"] and events[-1][
        "status"
    ] == "failed"


@pytest.fixture
def nodes(ground, monkeypatch):
    (ground.folder / "own_judges.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(ground.folder))
    with forgotten("own_judges"):
        yield


SOME_FAIL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(map(ord, solution_str))
    if number % 100 < {percent}:
        raise ValueError('\\x1b[2Jno luck')
    return number % 7 / 6
"""
PROGRAM = """
from distflow import NodeRole, Pipeline, node
from distflow.pipelines import nodes


@node(writes=("scores", "valid", "reward_errors"), role=NodeRole.REWARD)
def says_so(responses):
    errors = ["a bad day" if sum(map(ord, text)) % 4 else None for text in responses]
    return [0.5] * len(errors), [error is None for error in errors], errors


@node(writes="scores", role=NodeRole.REWARD)
def raises(responses):
    if sum(map(ord, "".join(responses))) % 4:
        raise ConnectionError("the judge is not at home")
    return [0.5 + i for i in range(len(responses))]


def make(reward):
    pipeline = Pipeline("own")
    pipeline.add_node("answer", nodes.generate)
    pipeline.add_node("reward", reward, node_role=NodeRole.REWARD, deps=["answer"])
    pipeline.add_node("compare", nodes.compute_advantage)
    pipeline.add_node("learn", nodes.train_actor)
    return pipeline.build()


def that_says_so():
    return make(says_so)


def that_raises():
    return make(raises)
"""


SHORT = {"grpo": (), "ppo": (), "dapo": ("reward.overlong.buffer_tokens=0",)}


@pytest.mark.parametrize("preset", one_fast_in(3, ["grpo", "ppo", "dapo"]))
def test_above_the_limit_the_run_stops_before_it_learns(ground, capsys, preset):
    """Most of GRPO's groups have too few verdicts and reach no batch: their verdicts count all the
    same."""
    ground.write_reward(SOME_FAIL.format(percent=55))
    size = "actor_rollout_ref.rollout.n=1" if preset == "ppo" else "actor_rollout_ref.rollout.n=4"
    keys = (size, *SHORT[preset], "trainer.total_epochs=9", "reward.max_error_rate=0.2")
    assert train(ground, *keys, preset=preset) == 2
    err = capsys.readouterr().err
    said = re.search(
        (
            r"(\d+) of (\d+) scores are reward errors .* at step (\d+), more than "
            r"reward.max_error_rate="
        ),
        err,
    )
    assert said, err
    failed, asked, step = map(int, said.groups())
    assert failed > 0.2 * asked and asked % 4 == 0
    assert "custom: ValueError: \\x1b[2Jno luck (at reward.py:5)" in err and "\x1b" not in err
    assert err.count("distflow: ") == 1 and "Traceback" not in err
    learned = [
        record.step for record in read_metrics(ground.folder / "run") if record.kind == "train"
    ]
    assert learned == list(range(1, step))


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("builder", "said"),
    [("that_says_so", "a bad day (node 'reward')"), ("that_raises", "the judge is not at home")],
)
def test_a_reward_that_is_a_node_counts_too(ground, capsys, builder, said):
    keys = ground.overrides("run", "trainer.total_epochs=9", f"dag.pipeline=own_judges:{builder}")
    keys = [
        key
        for key in keys
        if not key.startswith(("reward.", "custom_reward_function.", "trust.check_rewards"))
    ]
    assert cli.main(["train", "grpo", *keys, "actor_rollout_ref.actor.use_kl_loss=false"]) == 2
    err = capsys.readouterr().err
    assert "more than reward.max_error_rate=0.5 allows" in err and said in err
