"""`distflow migrate`: what it prints and writes, and what it says of a file that it cannot read."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distflow.cli import main

FILES = Path(__file__).parent / "migration" / "files"


@pytest.mark.slow
def test_the_config_is_printed_and_what_is_missing_goes_to_the_other_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["migrate", str(FILES / "verl_grpo.sh"), "--devices", "1"]) == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)
    assert config["defaults"] == ["verl_grpo", "_self_"] and "launcher" not in config.get(
        "trainer", {}
    )
    assert config["actor_rollout_ref"]["rollout"]["name"] == "vllm" and "made_up=3" in err


@pytest.mark.slow
def test_a_written_config_is_accepted_and_has_no_key_that_nothing_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mine.yaml"
    script = tmp_path / "train.sh"
    rows = "data.train_files=builtin:arithmetic-rl data.val_files=builtin:arithmetic-val"
    keys = (
        "critic.optim.lr=1e-4 actor_rollout_ref.model.path=builtin:tiny-arithmetic "
        "data.train_batch_size=4"
    )
    script.write_text(
        f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {rows} {keys}\n"
    )
    assert main(["migrate", str(script), "--to", str(target)]) == 0
    assert "critic.optim.lr=0.0001: it has no effect: with verl_grpo" in capsys.readouterr().err
    assert "critic" not in yaml.safe_load(target.read_text())
    assert main(["config", str(target), "data.answer_key=answer"]) == 0


@pytest.mark.slow
def test_a_key_that_a_run_would_be_rejected_for_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        "data.train_files=builtin:arithmetic-rl "
        "actor_rollout_ref.model.path=builtin:tiny-arithmetic"
    )
    keys = [
        "policy_loss.loss_mode=gspo",
        "clip_ratio_c=10.0",
        "strategy=fsdp",
        "fsdp_config.offload_policy=true",
    ]
    keys = [f"actor_rollout_ref.actor.{key}" for key in keys]
    (tmp_path / "x.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.n_gpus_per_node=4 "
        f"{rows} "
        f"{' '.join(keys)} actor_rollout_ref.rollout.name=sglang "
        "actor_rollout_ref.rollout.top_p=0.9\n"
    )
    assert main(["migrate", str(tmp_path / "x.sh")]) == 0
    out, err = capsys.readouterr()
    found = yaml.safe_load(out)["actor_rollout_ref"]
    assert (
        "top_p" not in found["rollout"]
        and "actor_rollout_ref.rollout.top_p=0.9: 'sglang' does not report" in err
    )
    assert "clip_ratio_c" not in found["actor"] and "clip_ratio_c=10.0: it has no effect" in err
    assert (
        found["actor"]["fsdp_config"] == {"offload_policy": True} and "would be rejected" not in err
    )


BAD = {
    "empty.sh": ("", "it is empty"),
    "binary.sh": (b"\x00\x01\xff", "it is not a text file"),
    "zeros.sh": (b"a\x00b", "it is not a text file"),
    "latin.sh": ("# caf\xe9".encode("latin-1"), "it is not a text file"),
    "train.py": ("GRPOTrainer('m').train()\n", "--learning_rate=1e-6"),
    "kto.sh": (
        "python -m openrlhf.cli.train_kto --lr 1\n",
        ("'openrlhf.cli.train_kto' uses an unsupported"),
    ),
    "none.sh": ("echo hello\n", "no command in it trains"),
    "quote.sh": ("echo 'open\n" + "x\n" * 20000, "a quotation mark is not closed"),
    "areal.sh": (
        "python -m areal.launcher.local x.py --config gone.yaml\n",
        ("its settings are in gone.yaml"),
    ),
    "tabs.yaml": ("a:\n\t- b", "it is not valid YAML"),
    "note.ipynb": ("{}", "--learning_rate=1e-6"),
    "rows.jsonl": ('{"prompt": "1+1"}', "it is a file of data: name it in data.train_files"),
    "rows.parquet": (b"PAR1\x00", "it is a file of data"),
    "key.sh": (
        "python3 -m verl.trainer.main_ppo " + "a." * 50_000 + "b=1\n",
        ("more than 300 characters"),
    ),
    "keys.txt": ("a." * 50_000 + "b=1\n", "more than 300 characters"),
    "list.yaml": ("- a\n- b\n", "it is not a mapping of keys"),
    "version9.yaml": (
        "format: 9\nlearner: {rate: 1}\nseed: 1\nworld: {size: 3}\n",
        ("of an unknown version"),
    ),
    "bomb.yaml": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            (f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n")
            for old, new in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "it is not valid YAML",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_refused_with_one_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = BAD[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["migrate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and name in err and "Traceback" not in err


def test_targets_and_devices_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(FILES / "areal_grpo.yaml")
    taken = tmp_path / "taken.yaml"
    taken.touch()
    for options, said in (
        (["--to", str(taken)], "it is there already"),
        (["--to", str(tmp_path / "grpo.yaml")], "is not a preset's"),
        (["--to", str(tmp_path / "a.b.yaml")], "has no dots"),
        (["--to", str(tmp_path / "gone" / "a.yaml")], "in a folder that does not exist"),
        (["--devices", "0"], "at least one device"),
    ):
        assert main(["migrate", script, *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["migrate", str(tmp_path / "gone.sh")]) == 2
    assert "gone.sh: there is no such file or folder" in capsys.readouterr().err


def test_a_config_of_ours_is_not_taken_for_another_systems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would become another pipeline."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [grpo, _self_]\nactor_rollout_ref: {rollout: {n: 4}}\n"
        "data: {train_batch_size: 4}\n"
    )
    assert main(["migrate", str(file)]) == 2
    assert "it is a config of distflow already" in capsys.readouterr().err
    file.write_text(file.read_text().replace("grpo", "ppo_trainer"))
    assert main(["migrate", str(file)]) == 0


SIZES = "model_name_or_path: m\nnum_generations: 8\nlearning_rate: 1e-6\n"
HUGE = {
    "a list times a number": SIZES
    + "per_device_train_batch_size: [1]\ngradient_accumulation_steps: 99999999999\n",
    "a text times a number": SIZES
    + "per_device_train_batch_size: ab\ngradient_accumulation_steps: 99999999999\n",
    "numbers that are none": SIZES
    + f"per_device_train_batch_size: .nan\nmax_steps: .inf\nsave_steps: 1{'0' * 400}\n",
    "references": SIZES
    + "".join(f"b{n}: ${{b{n + 1}}}${{b{n + 1}}}\n" for n in range(25))
    + "b25: aaaaaa\n",
    "brackets": SIZES + "beta: " + "[" * 900 + "]" * 900,
    "devices": (
        "pretrain: m\nrollout_batch_size: 8\nactor_train: {device_mapping: "
        "'list(range(0,99999999999))'}\n"
    ),
    "an option of a server": "actor_rollout_ref: {rollout: {n: 4, engine_kwargs: {vllm: {"
    + ", ".join(f"x{n}: 1" for n in range(100))
    + "}}}, model: {path: m}}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_a_small_file_takes_little_memory_and_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(HUGE[name])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    command = [sys.executable, "-m", "distflow", "migrate", str(tmp_path / "x.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr


def test_a_command_does_not_read_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.sh").write_text("trl grpo --config x.sh\n")
    assert main(["migrate", str(tmp_path / "x.sh")]) == 2
    assert "x.sh" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_other_forms_of_a_config_are_read(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {
        "toml": 'model_name_or_path = "m"\nbeta = 0.5\n',
        "json": '{"model_name_or_path": "m", "beta": 0.5}',
    }
    (tmp_path / f"x.{suffix}").write_text(text[suffix])
    assert main(["migrate", str(tmp_path / f"x.{suffix}")]) == 0
    assert (
        yaml.safe_load(capsys.readouterr().out)["actor_rollout_ref"]["actor"]["kl_loss_coef"] == 0.5
    )
