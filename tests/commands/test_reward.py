"""`distflow reward check`: what it prints and its exit status."""

from pathlib import Path

import pytest

from distflow.cli import main

DATA = ("--data", "builtin:arithmetic-rl", "--rows", "4", "--workers", "1")


def test_a_reward_without_and_one_with_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ends.py").write_text(
        "def compute_score(solution_str, ground_truth):\n    return solution_str.endswith(ground_truth)\n"
    )
    assert main(["reward", "check", "exact_match", *DATA]) == 0
    said = capsys.readouterr().out
    assert "answers found, of 4: box 4, phrase 0, hashes 4, alone 4" in said and "no fault found" in said
    for name in ("ends.py", "ends.py:compute_score", "ends:compute_score"):
        assert main(["reward", "check", name, *DATA]) == 1
        said = capsys.readouterr().out
        assert "answers found, of 4: box 0, phrase 0, hashes 4, alone 4" in said
        assert "another sign" in said and "8 false positives" in said and "'-128' for '128' got 1" in said
        assert "verdict takes" in said and "no fault found" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("format", *DATA), "does not compare with the row's answer"),
        (("no_such.py", *DATA), "no_such.py"),
        (("math", "--data", "no_such.jsonl"), "no_such.jsonl"),
        (("math", *DATA, "--answer-key", "label"), "'label'"),
    ],
)
def test_what_cannot_be_checked_is_the_users_fault(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reward", "check", *arguments]) == 2
    assert message in capsys.readouterr().err
