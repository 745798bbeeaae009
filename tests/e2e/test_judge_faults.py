"""A run whose judge answers badly in every way: each costs its own verdict, by name, and the key is
written nowhere."""

from pathlib import Path

import pytest

from distflow import cli
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import Playground
from tests.rewards.test_judge_reward import SECRET, Reply, completion, reward_result
from tests.rewards.test_judge_reward import server as server

pytestmark = [pytest.mark.slow, pytest.mark.faults]
BAD: dict[int, tuple[Reply | None, str]] = {
    1: ((200, {"content-type": "text/html"}, b"<html>busy</html>"), "not a chat completion"),
    2: ((200, {}, f"who is {SECRET}?".encode()), "who is ***?"),
    3: (completion('{"score": NaN, "reason": "x"}'), "not between 0 and 1"),
    4: ((429, {"retry-after": "3600"}, b"{}"), "status 429, and asks to wait 3600 s"),
    5: ((200, {"content-length": "99"}, b'{"choices"'), "its reply is incomplete"),
    6: (None, "Connection error"),
    7: (
        (401, {}, f'{{"error": {{"message": "not {SECRET}"}}}}'.encode()),
        "OPENAI_API_KEY holds its key",
    ),
}


def kind(response: str) -> int:
    return sum(map(ord, response)) % 14


def test_each_costs_its_own_verdict(
    server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(content: str, number: int) -> Reply | None:
        found = kind(content)
        return BAD[found][0] if found in BAD else reward_result(found / 13, f"{SECRET} is the key")

    server.reply = reply
    options = f"{{model: m, base_url: '{server.url}', retries: 1, template: '{{response}}'}}"
    ground = Playground(tmp_path, num_rows=8)
    keys = (
        f"reward.functions={{default: [{{name: judge, options: {options}}}]}}",
        "reward.max_error_rate=1",
        "trainer.total_epochs=1",
    )
    given = [
        key
        for key in ground.overrides("run")
        if not key.startswith(("reward.functions", "custom_reward"))
    ]
    assert cli.main(["train", "grpo", *given, *keys]) == 0
    records = [record for record in read_metrics(tmp_path / "run") if record.kind == "train"]
    rows = [row for record in records for row in read_samples(tmp_path / "run", record.step)]
    assert {kind(row["response"]) for row in rows} & set(BAD), "some were met"
    for row in rows:
        found = kind(row["response"].replace("<", "&lt;"))  # as the judge is given it
        if found in BAD:
            assert row["score"] is row["acc"] is None and row["advantage"] == 0.0
            assert (
                BAD[found][1] in row["errors"] and f"(model 'm' at {server.url})" in row["errors"]
            )
        else:
            assert row["score"] == pytest.approx(found / 13) and row["extra"] == {
                "judge/reason": "*** is the key"
            }
    assert sum(record.values["reward/errors/judge"] for record in records) >= len(
        [r for r in rows if r["errors"]]
    )
    assert SECRET not in "".join(capsys.readouterr())
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
