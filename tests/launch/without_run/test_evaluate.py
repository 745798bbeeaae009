"""`distflow eval` of a config whose run has several workers: the whole model, in this process."""

import json
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.launch import scoring_engines
from distflow.observe.run_reader import read_samples
from tests.sparse_params import one_fast_in
from tests.tiny_models import write_tiny_judge

RAY = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
PLACED = (
    (*RAY, "trainer.allocation='embedded[rollout]:d1+torch[actor]:d1'"),
    (*RAY, "actor_rollout_ref.actor.strategy=fsdp"),
)


@pytest.mark.parametrize("keys", one_fast_in(2, PLACED))
def test_parts_of_several_workers_are_evaluated_as_in_one(tmp_path, keys):
    check_same_responses(tmp_path, keys)


def test_models_of_the_training_loop_are_not_loaded(tmp_path, monkeypatch):
    """Validation has no scores of these models."""
    monkeypatch.delattr(scoring_engines, "_build_judge")
    judge = f"{{path: {write_tiny_judge(tmp_path / 'judge')}, judge: true, answer_tokens: 4}}"
    models = f"reward_model.models={{critique: {judge}}}"
    check_same_responses(tmp_path, (*RAY, "actor_rollout_ref.actor.strategy=fsdp", models))


def check_same_responses(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Those with the keys are those without."""
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 14)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "eval",
        "examples/tiny.yaml",
        f"data.val_files={tmp_path}/rows.jsonl",
        "trainer.device=cpu",
    ]

    given = []
    for name, more in (("one", ()), ("several", keys)):
        assert main([*command, *more, f"--to={tmp_path}/{name}"]) == 0
        given.append([row["response"] for row in read_samples(tmp_path / name, 0, "val")])

    assert given[0] == given[1] and len(given[0]) == len(rows)
