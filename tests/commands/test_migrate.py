"""`distflow migrate`: what it prints and writes, and what it says of a file that it cannot read."""

from pathlib import Path

import pytest
import yaml

from distflow.cli import main

FILES = Path(__file__).parent / "migration" / "files"


@pytest.mark.slow
def test_the_config_is_printed_and_what_is_missing_goes_to_the_other_stream(capsys):
    assert main(["migrate", str(FILES / "verl_grpo.sh"), "--devices", "1"]) == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)
    assert config["defaults"] == ["verl_grpo", "_self_"] and "launcher" not in config.get(
        "trainer", {}
    )
    assert config["actor_rollout_ref"]["rollout"]["name"] == "vllm" and "made_up=3" in err


@pytest.mark.slow
def test_a_written_config_is_accepted_and_has_no_key_that_nothing_reads(tmp_path, capsys):
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
def test_a_file_that_cannot_be_read_is_refused_with_one_message(name, tmp_path, capsys):
    content, said = BAD[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["migrate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and name in err and "Traceback" not in err


def test_a_config_of_ours_is_not_taken_for_another_systems(tmp_path, capsys):
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


def test_a_command_does_not_read_itself(tmp_path, capsys):
    (tmp_path / "x.sh").write_text("trl grpo --config x.sh\n")
    assert main(["migrate", str(tmp_path / "x.sh")]) == 2
    assert "x.sh" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_other_forms_of_a_config_are_read(suffix, tmp_path, capsys):
    text = {
        "toml": 'model_name_or_path = "m"\nbeta = 0.5\n',
        "json": '{"model_name_or_path": "m", "beta": 0.5}',
    }
    (tmp_path / f"x.{suffix}").write_text(text[suffix])
    assert main(["migrate", str(tmp_path / f"x.{suffix}")]) == 0
    assert (
        yaml.safe_load(capsys.readouterr().out)["actor_rollout_ref"]["actor"]["kl_loss_coef"] == 0.5
    )
