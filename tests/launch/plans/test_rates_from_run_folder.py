"""Plans that a run calibrates: the rates are found that its folder was made with, a real run is
predicted as it was, and a change is what the simulator says of it."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.config import RunLimits, to_yaml
from distflow.launch.plans.plan_before_run import RunPlanner, keys_of, outcomes
from distflow.launch.plans.rates_from_run_folder import as_predicted, measured_run
from distflow.observe.report.build import report_data
from distflow.observe.sample_files import write_sample_file
from distflow.planning.measured_rates import Rates
from distflow.planning.predicted_run import Lengths, PredictedRun, RunFacts, predict

TINY = [
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
]
TINY += ["trainer.num_threads=1"]
KNOWN = Rates(
    generate=3.0, forward=0.5, update=0.5, sync=1.0, scores=(0.01,), rest=2e-4, libraries=0.7e9
)


def write(folder: Path, *overrides: str, steps: int = 6) -> PredictedRun:
    """The folder of a run with these rates, whose responses have 10 tokens."""
    planner = RunPlanner("quickstart_grpo", [*TINY, *overrides], "cpu")
    given = RunFacts(RunLimits(2000), Lengths(6.0, 10.0, 26, (10.0,)), KNOWN)
    run = predict(planner.loaded.config, planner.pipeline, planner.shapes, planner.device, given)
    (folder / "spans").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(run.config))
    predicted = as_predicted(run, planner.device, planner.shapes)
    nodes = planner.pipeline.to_json()
    (folder / "plan.json").write_text(
        json.dumps({**asdict(run.plan), "nodes": nodes, "predicted": predicted})
    )
    files: dict[str, list[dict[str, object]]] = {
        "metrics": [],
        "spans/engine": [],
        "spans/reward": [],
    }
    timed = {name: value for name, value in run.phases.items() if name != "rest"}
    groups = run.config.data.train_batch_size
    workers = run.config.reward.num_workers
    for step in range(1, steps + 1):
        began = 1000 + (step - 1) * run.step_seconds
        end = began + run.times.generate()
        times = {"t0": began, "t1": end, "restart": 0, "step": step}
        files["spans/engine"].append(
            {**times, "kind": "decode", "what": "train", "version": step - 1}
        )
        for group in range(groups):
            scored = end + KNOWN.score * (1 + group // workers)
            files["spans/reward"].append(
                {**times, "t0": end, "t1": scored, "kind": "wait", "what": "scores"}
            )
        measured = {
            "timing_s": {**timed, "eval": 0.0},
            "memory": {"process": {"peak": run.fullest.peak}},
        }
        line = {
            "step": step,
            "t": began + run.step_seconds,
            "restart": 0,
            "kind": "train",
            "m": measured,
        }
        files["metrics"].append(line)
        rows = [{"prompt_length": 6, "response_length": 10, "restart": 0}] * 8
        write_sample_file(folder / f"samples/{step:06d}.parquet", rows, step, "train")
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.actor.use_kl_loss=true",)])
def test_the_rates_of_a_run_are_found(tmp_path: Path, more: tuple[str, ...]) -> None:
    run = write(tmp_path / "run", *more)
    found = measured_run(str(tmp_path / "run")).rates
    for name in ("generate", "forward", "update", "rest", "score", "libraries"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name
    again = RunPlanner("quickstart_grpo", [*TINY, *more], measured_in=str(tmp_path / "run")).run
    assert again.step_seconds == pytest.approx(run.step_seconds, rel=0.02)
    assert again.fullest.peak == pytest.approx(run.fullest.peak, rel=0.02)
    assert again.phases == pytest.approx(run.phases, rel=0.03, abs=1e-3)


def test_another_config_scales_what_was_measured(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    twice = ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128"]
    more = RunPlanner("quickstart_grpo", [*TINY, *twice], measured_in=str(tmp_path / "run")).run
    assert more.phases["train_step"] == pytest.approx(2 * run.phases["train_step"], rel=0.1)
    assert more.phases["rest"] == pytest.approx(2 * run.phases["rest"], rel=0.05)
    longer = RunPlanner(
        "quickstart_grpo", [*TINY, "data.max_response_length=52"], measured_in=str(tmp_path / "run")
    )
    assert longer.run.lengths.response == 10, "all responses ended by themselves"


def test_a_change_is_what_the_simulator_says_of_it(tmp_path: Path) -> None:
    write(tmp_path / "run")
    planner = RunPlanner("quickstart_grpo", TINY, measured_in=str(tmp_path / "run"))
    before, more, shorter, beside = outcomes(
        planner, ["rewards*2", "data.max_response_length=5", "staleness+1"]
    )
    assert more.keys == ("reward.num_workers=4",)
    by_hand = replace(planner, overrides=[*TINY, "reward.num_workers=4"])
    steps = sorted(by_hand.simulate(by_hand.run, 16, seed).step_seconds for seed in range(5))
    assert (more.seconds, more.low, more.high) == (steps[2], steps[0], steps[-1]), (
        "all measured steps were equal"
    )
    assert before.seconds - more.seconds == pytest.approx(KNOWN.score * 16, rel=0.05), (
        "32 scorings each become 16"
    )
    assert shorter.seconds < before.seconds and beside.seconds < before.seconds
    for each in (before, more, shorter, beside):
        assert each.low <= each.seconds <= each.high and not each.why
    assert f"rewards*2: a step of {more.seconds:.3g} s" in more.line(before)


def test_a_device_is_moved_in_the_allocation() -> None:
    words = [*TINY, "trainer.launcher=ray", "trainer.n_gpus_per_node=4"]
    apart = RunPlanner(
        "grpo", [*words, "trainer.allocation=embedded:d1+fsdp:d3"], "cpu"
    ).loaded.config
    assert keys_of("rollout+1", apart) == (
        "trainer.allocation='embedded[rollout]:d2+fsdp[actor]:d2'",
    )
    assert keys_of("response/2", apart) == (
        f"data.max_response_length={apart.data.max_response_length // 2}",
    )


@pytest.mark.slow
def test_a_run_is_predicted_as_it_was_and_calibrates_the_next(tmp_path: Path) -> None:
    quiet = [
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.device=cpu",
    ]
    small = [
        *TINY,
        *quiet,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]
    first, second = (f"trainer.default_local_dir={tmp_path / name}" for name in ("first", "second"))
    assert main(["train", "quickstart_grpo", *small, "trainer.total_training_steps=6", first]) == 0
    measured = measured_run(str(tmp_path / "first"))
    run = RunPlanner("quickstart_grpo", small, measured_in=str(tmp_path / "first")).run
    assert run.step_seconds == pytest.approx(measured.step_seconds, rel=0.3)
    assert f"{measured.rates.generate:.3g}" != "1" and measured.rates.libraries
    again = [
        *small,
        "trainer.total_training_steps=2",
        f"trainer.plan_from={tmp_path / 'first'}",
        second,
    ]
    assert main(["train", "quickstart_grpo", *again]) == 0
    predicted = json.loads((tmp_path / "second/plan.json").read_text())["predicted"]
    assert predicted["calibrated_by"] == str(tmp_path / "first")
    assert predicted["phases"]["train_step"] == pytest.approx(run.phases["train_step"], rel=1e-6)
    for name, ends in (("first", "set trainer.plan_from"), ("second", str(tmp_path / "first"))):
        sentences = [
            each
            for each in report_data(tmp_path / name)["sentences"]
            if "estimate before" in each["text"]
        ]
        assert len(sentences) == 1 and "it took" in sentences[0]["text"]
        assert ends in sentences[0]["text"] + sentences[0]["advice"]


def test_a_calibrated_plan_needs_neither_torch_nor_the_models_folder(tmp_path: Path) -> None:
    write(tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(
        config.replace("builtin:tiny-arithmetic", "builtin:not-here", 1)
    )
    code = "import sys; from distflow.cli import main; assert main(sys.argv[1:]) == 0\n"
    code += "print({'torch', 'ray'} & {*sys.modules})"
    words = [
        sys.executable,
        "-c",
        code,
        "plan",
        "--from",
        str(tmp_path / "run"),
        "--what-if",
        "rewards*2",
    ]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "set()" and "rewards*2: a step of" in out
