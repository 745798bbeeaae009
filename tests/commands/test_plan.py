"""`distflow plan`: the plan that the run then has; what does not fit is refused with
a remedy."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from distflow.api.arguments_to_config import PythonInputs
from distflow.api.train import read
from distflow.cli import main, make_parser
from distflow.commands.train import _load_runs
from distflow.config import load_config
from distflow.launch.make_spec import make_spec

TINY = "actor_rollout_ref.model.path=builtin:tiny-arithmetic"
SEVEN = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"
PLANNED = """
import json, sys
from distflow.api.arguments_to_config import PythonInputs
from distflow.api.train import read
from distflow.cli import main, make_parser
from distflow.commands.train import _load_runs
for words in json.loads(sys.argv[1]):
    assert main(["plan", *words, "--json"]) == 0
print([name for name in ("ray",) if name in sys.modules])
"""
YAML = (
    "dag.pipeline=[{id: rollout, func: 'distflow.pipelines.nodes:generate'},"
    "{id: reward, func: 'distflow.pipelines.nodes:compute_reward', role: REWARD},"
    "{id: calculate_advantages, func: 'distflow.pipelines.nodes:compute_advantage', role: "
    "ADVANTAGE},"
    "{id: actor_train, func: 'distflow.pipelines.nodes:train_actor', type: MODEL_TRAIN, role: "
    "ACTOR}]"
)
RUNS = [
    ["quickstart_grpo", TINY],
    [
        "grpo",
        TINY,
        "data.train_files=builtin:arithmetic-rl",
        "actor_rollout_ref.actor.use_kl_loss=false",
    ],
    ["grpo", TINY, "data.train_files=builtin:arithmetic-rl", YAML],  # without the preset's KL
    ["ppo", TINY, "data.train_files=builtin:arithmetic-rl", "algorithm.adv_norm.mean_level=batch"],
    ["dapo", TINY, "data.train_files=builtin:arithmetic-rl"],
    ["async_ppo", TINY, "data.train_files=builtin:arithmetic-rl"],
    ["quickstart_sft", TINY],
    [
        *("ppo", TINY, "data.train_files=builtin:arithmetic-rl", "trainer.launcher=ray"),
        "trainer.allocation=embedded:d1|torch[actor]:d1+torch[critic]:d2+torch[ref]:d1",
    ],
]


@pytest.mark.slow
def test_it_does_not_load_ray_and_gives_the_plan_of_the_run(tmp_path: Path) -> None:
    words = [[*run, "--device", "cpu"] for run in RUNS]
    code = [
        sys.executable,
        "-W",
        "error::UserWarning:distflow",
        "-c",
        PLANNED,
        json.dumps(words),
    ]
    out = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    decoder = json.JSONDecoder()

    found = []
    at = 0
    for _ in RUNS:
        plan, end = decoder.raw_decode(out, at)
        found.append(plan)
        at = end + 1

    assert out[at:].strip() == "[]"
    for (preset, *overrides), planned in zip(RUNS, found, strict=True):
        own = [
            *overrides,
            "trainer.device=cpu",
            f"trainer.default_local_dir={tmp_path / preset}",
        ]
        spec = make_spec(load_config(preset, own), lambda line: None)
        plan = json.loads(json.dumps({**asdict(spec.plan), "nodes": spec.pipeline().to_json()}))
        assert planned["plan"] == plan, preset
        assert planned["run"]["steps"] == spec.data.total_steps, preset


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["async_grpo", SEVEN, "--device", "h100", "trainer.launcher=ray", "cost.gpu_hour=2"]
    words += [
        "trainer.allocation=embedded:d4+fsdp:d4",
        "trainer.total_training_steps=10",
        "async.max_staleness=2",
    ]
    words += [
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.rollout.max_num_seqs=64",
    ]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    plan = planned(capsys, *words)
    assert plan["fits"] and plan["run"]["steps"] == 10
    assert plan["run"]["cost"] == pytest.approx(plan["run"]["hours"] * 8 * 2)
    assert "weight sync, bytes of a step: " in text
    assert f"costs {plan['run']['cost']:,.2f}" in text
    bars = plan["step"]["bars"]
    assert {bar["what"] for bar in bars} >= {
        "generate",
        "actor_old_log_prob",
        "actor_train",
        "weight sync",
    }
    assert all(0 <= bar["start"] <= bar["end"] <= plan["step"]["seconds"] + 1e-9 for bar in bars)


def test_what_does_not_fit_is_refused_with_what_needs_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["grpo", SEVEN, "--device", "h100", "--devices", "8"]
    assert main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 0 needs" in line and "activations of the actor" in line
    assert "actor_rollout_ref.actor.strategy=fsdp" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", "trainer.allocation='embedded:d2?fsdp:d2'"], "'embedded:d2.fsdp:d2': write"),
        (["grpo", "trainer.allocation=embedded:d2+fsdp:d2p2"], "no pipeline parallelism"),
        (
            ["grpo", SEVEN, "trainer.allocation=embedded:d2+fsdp:t8", "trainer.launcher=ray"],
            "28, which its size 8",
        ),
        (
            ["grpo", "actor_rollout_ref.model.path=no/such-model"],
            "no config.json of 'no/such-model'",
        ),
        (["grpo"], "actor_rollout_ref.model.path is not set"),
        (["grpo", TINY, "--device", "abacus"], "no device 'abacus'"),
        (["grpo", TINY, "--devices", "12"], "multiple of 8"),
        (["grpo", TINY, "--devices", "4", "trainer.n_gpus_per_node=2"], "--devices 4 contradicts"),
        (["grpo", TINY, "--response-tokens", "-3"], "the mean must be above 0"),
        (["grpo", TINY, "--prompt-tokens", "1e9"], "at most data.max_prompt_length"),
        (["grpo", TINY, "no.such.key=1"], "no.such.key"),
        (["no_such_preset", TINY], "no_such_preset"),
        (["--from", "no/such/run"], "there is no run: no/such/run/config.yaml does not exist"),
        (["grpo", TINY, "--from", "no/such/run"], "there is no folder no/such/run"),
        (["grpo", TINY, "--from", "tests"], "tests cannot calibrate a plan: it has no config.yaml"),
        ([], "name a preset or a YAML file, or a run"),
    ],
)
def test_wrong_input_is_one_clear_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:

    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


@pytest.mark.parametrize("number", ["0", "1000000", "-1", "many"])
def test_a_number_of_devices_out_of_range_is_refused(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "grpo", TINY, "--devices", number])
    assert stopped.value.code == 2
    assert "1 to 8,192" in capsys.readouterr().err


def test_code_that_a_config_names_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "quickstart_grpo", TINY, "--device", "cpu", "--no-code"]
    assert main([*words, "trainer.imports=[this]"]) == 2
    assert "the plan would import Python code: trainer.imports: this" in capsys.readouterr().err


def test_a_timeout_of_rewards_cuts_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "quickstart_grpo",
        TINY,
        "--device",
        "cpu",
        "reward.num_workers=8",
        "data.train_batch_size=8",
    ]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "--reward-seconds", "5"]

    seconds = []
    for timeout_s in ("10", "1"):
        plan = planned(capsys, *words, f"reward.timeout_s={timeout_s}")
        seconds.append(plan["step"]["seconds"])

    before, cut = seconds
    assert cut < 0.5 * before


@pytest.mark.slow
def test_a_searched_allocation_is_listed_and_the_run_takes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "async_grpo",
        TINY,
        "trainer.allocation=auto",
        "trainer.launcher=ray",
        "trainer.n_gpus_per_node=4",
    ]
    words += ["data.train_files=builtin:arithmetic-rl", "actor_rollout_ref.model.init=random"]
    plan = planned(capsys, *words, "--device", "cpu")
    best = plan["allocations"][0]["allocation"]
    assert len(plan["allocations"]) == 10
    shown = [float(f"{each['step_seconds']:.3g}") for each in plan["allocations"]]
    assert sorted(shown) == shown
    arguments = make_parser().parse_args(["train", *words])
    (loaded,) = _load_runs(arguments, "grpo", print)
    assert loaded.config.trainer.allocation == best
    assert loaded.config.async_.max_staleness == plan["allocations"][0]["max_staleness"]
    assert f"trainer.allocation=auto: {best} " in capsys.readouterr().out
    from_python = read(words[0], words[1:], PythonInputs(), None)
    assert from_python.config.trainer.allocation == best
