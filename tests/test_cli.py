"""The command line: what each command prints and how it exits. In this process, but for one start
of it."""

import os
import signal
import subprocess
import sys

import pytest

from distflow import __version__
from distflow.cli import main

NEEDED = [
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "data.train_files=builtin:arithmetic-rl",
]
FRESH = "actor_rollout_ref.model.init=random"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    try:
        status = main(arguments)
    except SystemExit as left:  # argparse's way
        status = left.code if isinstance(left.code, int) else 1
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("arguments", [(), ("trian", "grpo"), ("export", "runs/x"), ("config",)])
def test_a_command_that_is_none_or_not_whole_exits_2(arguments, capsys):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and err.startswith(
        ("usage: distflow", "distflow: argument COMMAND")
    )


def test_a_wrong_value_is_one_line(capsys):
    status, _, err = run(capsys, "plan", "grpo", "--devices", "0")
    assert status == 2
    assert (
        err
        == "distflow plan: argument --devices: must be a whole number from 1 to 8,192, not '0'\n"
    )


def test_an_unknown_command_is_answered_with_those_there_are(capsys):
    _, _, err = run(capsys, "trian", "grpo")
    assert all(
        name in err
        for name in (
            "train",
            "sft",
            "eval",
            "export",
            "config",
            "doctor",
            "replay",
            "why",
            "report",
        )
    )


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("trian", "grpo"), "train"),
        (("list", "preset"), "presets"),
        (("reward", "chek", "r.py", "--data", "d"), "check"),
        (("sandbox", "serv"), "serve"),
        (("zzzzzz",), ""),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(arguments, meant, capsys):
    err = run(capsys, *arguments)[2]
    assert err.endswith(f"; did you mean '{meant}'?\n" if meant else ")\n")


def test_config_prints_what_loads_as_the_same(capsys, tmp_path):
    status, first, _ = run(
        capsys, "config", "grpo", *NEEDED, "data.train_batch_size=600", "++trainer.seed=3"
    )
    assert status == 0 and "train_batch_size: 600" in first and "seed: 3" in first
    file = tmp_path / "resolved.yaml"
    file.write_text(first)
    assert run(capsys, "config", str(file)) == (0, first, "")


def test_explain_tells_description_bounds_default_value_and_origin(capsys):
    status, out, _ = run(
        capsys, "config", "ppo", *NEEDED, "algorithm.lam=0.9", "--explain", "algorithm.lam"
    )
    assert status == 0
    assert [line.split() for line in out.splitlines()] == [
        ["algorithm.lam"],
        ["lambda", "of", "GAE"],
        ["type", "float"],
        ["allowed", "≥", "0", "and", "≤", "1"],
        ["default", "0.95"],
        ["value", "0.9"],
        ["origin", "command", "line"],
    ]


def test_explain_says_which_file_and_line_set_a_key(capsys):
    _, out, _ = run(
        capsys, "config", "dapo", *NEEDED, "--explain", "actor_rollout_ref.actor.clip_ratio_high"
    )
    origin = next(line for line in out.splitlines() if "origin" in line)
    assert "dapo.py:" in origin
    _, out, _ = run(capsys, "config", "dapo", *NEEDED, "--explain", "trainer.save_freq")
    assert next(line for line in out.splitlines() if "origin" in line).split() == [
        "origin",
        "default",
    ]


def test_explain_of_a_group_lists_its_keys(capsys):
    status, out, _ = run(capsys, "config", "grpo", *NEEDED, "--explain", "algorithm.kl_ctrl")
    assert status == 0
    assert [line.split("=")[0] for line in out.splitlines()] == [
        f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "target_kl", "horizon", "mean")
    ]


def test_explain_of_no_key_names_the_nearest(capsys):
    status, out, err = run(capsys, "config", "grpo", *NEEDED, "--explain", "algorithm.gama")
    assert (status, out) == (2, "") and "algorithm.gamma" in err


def test_graph_draws_the_pipeline_that_is_bound(capsys):
    status, out, _ = run(capsys, "config", "grpo", *NEEDED, "--graph")
    assert status == 0 and out.splitlines()[1].startswith("  rollout_actor")
    _, mermaid, _ = run(capsys, "config", "grpo", *NEEDED, "--mermaid")
    assert mermaid.startswith("flowchart")

    for node in (
        "rollout_actor",
        "function_reward",
        "reference_log_prob",
        "calculate_advantages",
        "actor_train",
    ):
        assert node in out and node in mermaid

    _, ppo, _ = run(capsys, "config", "ppo", *NEEDED, "--graph")
    assert "critic_train" in ppo and "critic_train" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("config", "gpro"), ("gpro", "grpo")),
        (
            ("config", "grpo", *NEEDED, "data.trian_batch_size=8"),
            ("data.trian_batch_size", "data.train_batch_size"),
        ),
        (
            ("train", "grpo", *NEEDED, FRESH, "critic.ppo_epochs=3"),
            ("critic.ppo_epochs", "command line"),
        ),
        (("report", "no/such/run"), ("no/such/run",)),
        (("report", "."), ("not a run's folder",)),
        (("export", "no/such/run", "--to", "x"), ("no/such/run",)),
        (("replay", "no/such/bundle"), ("no/such/bundle",)),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.startswith("distflow: ") and "Traceback" not in err
    assert all(word in err for word in words), err


def test_debug_shows_the_traceback(capsys):
    status, _, err = run(capsys, "config", "gpro", "--debug")
    assert status == 2 and "Traceback" in err


def test_doctor_tells_of_machine_packages_and_faults(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "doctor")
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings == [f"distflow {__version__}", "machine", "packages", "wrong"]
    assert status == (0 if out.splitlines()[-1].strip() == "nothing found" else 1)
    assert "torch 2." in out


def test_ctrl_c_while_arguments_are_parsed_is_one_line_and_130(capsys, monkeypatch):
    monkeypatch.setattr("distflow.cli._parse", lambda argv: os.kill(os.getpid(), signal.SIGINT))
    assert run(capsys, "config") == (130, "", "distflow: ended by SIGINT\n")


def test_python_dash_m_starts_it_and_imports_wait():
    """One real process. Neither torch nor transformers is loaded to say what is wrong with a
    config."""
    probe = (
        "import sys, runpy; sys.argv = ['distflow', 'config', 'grpo', 'data.train_batch_size=0']\n"
        "try:\n    runpy.run_module('distflow', run_name='__main__')\n"
        "except SystemExit as left:\n    print(left.code, *(sorted({'torch', 'transformers'} & "
        "set(sys.modules))))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "2\n", done.stdout + done.stderr
    assert "data.train_batch_size" in done.stderr


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_output_that_nobody_reads_ends_the_command_with_the_status_of_its_signal(unbuffered):
    """As `distflow config grpo | head -1`: what it did not get to do is no success."""
    with subprocess.Popen(
        [sys.executable, "-m", "distflow", "config", "grpo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()

    assert (process.returncode, said) == (128 + signal.SIGPIPE, b"")
