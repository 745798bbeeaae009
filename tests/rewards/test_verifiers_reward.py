"""Tasks of the package `verifiers` as rows, and their rewards; it is not among the extras of
`dev`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="wants the extra verifiers")

from distflow.data.dataset_columns import Columns, RawRow  # noqa: E402
from distflow.data.sources import load_rows  # noqa: E402
from distflow.errors import UserError  # noqa: E402
from distflow.rewards.verifiers_reward import compute_score  # noqa: E402

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    rows: int = 3

class Sum(vf.Task[Data]):
    {task}
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward
    async def brief(self, trace{needs}) -> dict[str, float]:
        return {{"short": float(len(trace.last_reply) < 5), "turns": float(trace.num_turns)}}

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, Config]):
    {taskset}
    def load(self):
        print("what a taskset prints is no row")
        for i in range(self.config.rows):
            yield Sum(Data(prompt=f"{{i}}+1=", answer=str(i + 1), system_prompt="Be brief."), self.config.task)

__all__ = ["Sums"]
"""  # noqa: E501


def rows_of(tmp_path: Path, monkeypatch: Any, query: str = "", **changes: str) -> list[RawRow]:
    name = f"toy_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(
        TASKSET.format(**{"task": "", "taskset": "", "needs": "", **changes})
    )
    monkeypatch.syspath_prepend(tmp_path)
    return load_rows(f"verifiers:{name}{query}", Columns(answer_required=False))[0]


def test_tasks_are_rows_and_their_rewards_scores(tmp_path, monkeypatch):
    rows = rows_of(tmp_path, monkeypatch, "?rows=2")
    assert [row.answer for row in rows] == ["1", "2"] and rows[0].domain.startswith(
        "verifiers/toy_"
    )
    assert rows[1].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
    ]
    said = asyncio.run(compute_score(" 2 ", rows[1].extra_info))
    assert said == {
        "score": 0.5 + 1 + 1,
        "rewards": {"right": 1.0, "short": 1.0, "turns": 1.0},
        "metrics": {"length": 1.0},
    }
    assert asyncio.run(compute_score("I do not know", rows[1].extra_info))["score"] == 1.0
    with pytest.raises(ValueError, match="verifiers:ID"):
        asyncio.run(compute_score("2", {}))


@pytest.mark.parametrize(
    "changes, said",
    [({"query": "?row=2"}, "cannot be loaded"), ({"taskset": "INFINITE = True"}, "is infinite")],
)
def test_tasksets_that_cannot_be_read_are_refused(tmp_path, monkeypatch, changes, said):
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path, monkeypatch, **changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"task": "NEEDS_CONTAINER = True"}, "needs a container"),
        ({"needs": ", runtime"}, "needs a runtime \\(for brief\\)"),
        ({"task": "async def setup(self, trace, runtime): ..."}, "needs a runtime \\(setup\\)"),
        ({"taskset": "toolsets = classmethod(lambda cls, config: [object()])"}, "needs tools"),
    ],
)
def test_what_needs_more_than_an_answer_is_for_the_workflow(tmp_path, monkeypatch, changes, said):
    row, *_ = rows_of(tmp_path, monkeypatch, **changes)
    with pytest.raises(ValueError, match=f"{said}.*rollout.workflow=verifiers"):
        asyncio.run(compute_score("2", row.extra_info))
