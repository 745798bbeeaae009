"""`distflow data check`: the first rows as tokens, what is trained on, lengths, duplicates,
overlap."""

import json
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.models.loading import load_tokenizer

MODEL = (
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
)


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    status = main(["data", "check", *arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    return [line.strip() for line in out.splitlines()]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_it_shows_tokens_lengths_duplicates_and_overlap(tmp_path, capsys):
    rows = [{"prompt": prompt, "answer": "3"} for prompt in ("1+2=", "11+22=", "1+2=", "1+2=")]
    train = write(tmp_path / "train.jsonl", rows)
    held_out = write(tmp_path / "val.jsonl", rows[1:2])
    lines = checked(
        capsys,
        "grpo",
        *MODEL,
        f"data.train_files={train}",
        f"data.val_files={held_out}",
        "--rows",
        "1",
    )
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")
    ids = tokenizer("1+2=")["input_ids"]
    assert (
        f"prompt, not trained on, {len(ids)} tokens: '1+2='" in lines
        and f"ids {' '.join(map(str, ids))}" in lines
    )
    longer = len(tokenizer("11+22=")["input_ids"])
    assert f"tokens of a prompt: minimum {len(ids)}, median {len(ids)}, 90 % {longer}" in next(
        line
        for line in lines
        if line.startswith("tokens of a prompt: ") and not line.endswith(f"maximum {len(ids)}")
    )
    assert any(
        line.startswith("2 duplicate rows, '1+2=' most often: 3 times, in ") for line in lines
    )
    assert any(
        line.startswith("warning: 1 of 1 validation prompts are trained on") for line in lines
    )
    assert "ground truth: '3'" in lines
    assert not any(
        "11+22=" in line for line in lines if line.startswith("prompt")
    ) or "row 2" not in " ".join(lines)
    files = (f"data.train_files={train}", f"data.val_files={held_out}", "data.allow_overlap=true")
    lines = checked(capsys, "grpo", *MODEL, *files)
    (said,) = (line for line in lines if "validation prompts are trained on" in line)
    assert said.startswith("as data.allow_overlap allows, 1 of 1 ") and said.endswith(
        "does not measure generalisation"
    )


def test_bad_data_is_one_message(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    for name, told in (("empty.jsonl", "no rows"), ("missing.jsonl", "missing.jsonl")):
        assert main(["data", "check", "grpo", *MODEL, f"data.train_files={tmp_path / name}"]) == 2
        out, err = capsys.readouterr()
        assert told in err and "Traceback" not in err
