"""`distflow reward check`: what it prints and its exit status."""

import json
from pathlib import Path

import pytest

from distflow.cli import main

DATA = ("--data", "builtin:arithmetic-rl", "--rows", "4", "--workers", "1")


def test_a_reward_without_and_one_with_faults(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ends.py").write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    return solution_str.endswith(ground_truth)\n"
    )
    assert main(["reward", "check", "exact_match", *DATA]) == 0
    said = capsys.readouterr().out
    assert (
        "answers found, of 4: box 4, phrase 0, hashes 4, alone 4" in said
        and "no fault found" in said
    )

    for name in ("ends.py", "ends.py:compute_score", "ends:compute_score"):
        assert main(["reward", "check", name, *DATA]) == 1
        said = capsys.readouterr().out
        assert "answers found, of 4: box 0, phrase 0, hashes 4, alone 4" in said
        assert (
            "another sign" in said
            and "8 false positives" in said
            and "'-128' for '128' got 1" in said
        )
        assert "call takes" in said and "no fault found" not in said


def test_rows_without_an_answer_are_counted(tmp_path, capsys):
    rows = [
        {"prompt": "5 m in cm=", "answer": "500"},
        {"prompt": "x"},
        {"prompt": "y", "answer": None},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(
        ["reward", "check", "exact_match", "--data", str(tmp_path / "rows.jsonl"), "--workers", "1"]
    )
    said = capsys.readouterr().out
    assert (
        "on 1 row; 2 bad rows skipped, the first: " in said
        and "rows.jsonl:2: no answer in the column" in said
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("format", *DATA), "does not compare with the row's answer"),
        (
            ("no_such.py", *DATA),
            "there is no file 'no_such.py': name the file with the reward function",
        ),
        (
            (f"{__file__}:no_such", *DATA),
            f"the reward functions ({__file__}:no_such) cannot be loaded: ",
        ),
        ((str(Path(__file__).parent), *DATA), "is a folder: name a file in it, e.g. "),
        (("math", "--data", "no_such.jsonl"), "no_such.jsonl"),
        (("math", *DATA, "--answer-key", "label"), "'label'"),
    ],
)
def test_what_cannot_be_checked_is_the_users_fault(arguments, message, capsys):
    assert main(["reward", "check", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_reference_solutions_that_fail_their_own_tests_are_listed_with_the_case(tmp_path, capsys):
    rows = [
        {
            "prompt": "Add one.",
            "code": f"def f(x):\n    return x + {n}\n",
            "test_list": ["assert f(1) == 2"],
        }
        for n in (1, 2, 1, 1, 3)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("--data", str(tmp_path / "rows.jsonl"), "--response-key", "code", "--rows", "0")
    assert main(["reward", "check", "code", *data, "--show", "1"]) == 1
    said = capsys.readouterr().out
    assert (
        "5 asked  2 false negatives" in said
        and "got 0, assert f(1) == 2: " in said
        and "rows.jsonl:2)" in said
    )
    assert "rows.jsonl:5)" not in said and "and 1 more; --show 0 shows all" in said
    main(["reward", "check", "code", *data, "--show", "0"])
    assert "rows.jsonl:5)" in capsys.readouterr().out


def test_the_readmes_own_reward_has_no_fault(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text(
        text.partition("cat > problems.jsonl <<'END'\n")[2].partition("END\n")[0]
    )
    Path("my_reward.py").write_text(text.partition("# my_reward.py\n")[2].partition("```")[0])
    status = main(["reward", "check", "my_reward.py", "--data", "problems.jsonl"])
    assert status == 0, capsys.readouterr().out


def test_a_column_that_is_not_there_is_named_by_its_option(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    assert main(["reward", "check", "exact_match", "--data", str(tmp_path / "rows.jsonl")]) == 2
    said = capsys.readouterr().err
    assert (
        "has the column 'prompt' (--prompt-key)" in said
        and "did you mean --prompt-key=question" in said
        and "data." not in said
    )


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--timeout", "-1"), "must be a number, above 0"),
        (("--timeout", "soon"), "must be a number, above 0"),
        (("--options", "{bad"), "write a JSON object"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(option, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["reward", "check", "exact_match", *DATA, *option])
    assert f"argument {option[0]}: {said}" in capsys.readouterr().err
