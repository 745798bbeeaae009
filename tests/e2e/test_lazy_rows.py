"""Runs that read a row when its group starts: the same run as with all rows read at the start."""

import json

import pytest
import torch

from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.e2e.test_domains import go_back
from tests.ledger_audit import verify

pytestmark = pytest.mark.slow
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trust.check_freq=1")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("lazy"))
    good = (ground.folder / "rows.jsonl").read_text()
    (ground.folder / "long.jsonl").write_text(
        good + json.dumps({"prompt": "x" * 40, "answer": "7"}) + "\n"
    )
    more = [json.dumps({"prompt": f"{i}=", "answer": "7", "response": "7"}) for i in range(256)]
    (ground.folder / "broken.jsonl").write_text("\n".join([*more, *["{ no JSON"] * 100]))

    return ground


def same_weights(one: Run, other: Run) -> None:
    for name, weight in one.weights(4).items():
        assert torch.equal(weight, other.weights(4)[name]), name


def dropped(run: Run) -> list[str]:
    return [
        record["reason"]
        for _, record in timeline(run.folder / "ledger.jsonl")
        if record["kind"] == "dropped"
    ]


def test_a_run_reads_the_same_rows_in_the_same_order(ground):
    eager = ground.run("grpo", *STEPS, name="eager")
    lazy = ground.run("grpo", *STEPS, "data.lazy=true", name="lazy")
    same_weights(eager, lazy)
    checks = lazy.notes("checks")
    assert checks == eager.notes("checks") and len(checks) >= 4 and not lazy.notes("warning")


def test_a_row_that_is_left_out_is_replaced_and_a_killed_run_goes_on_as_if_it_was_not(ground):
    settings = (*STEPS, f"data.train_files={ground.folder}/long.jsonl", "data.lazy=true")
    whole = ground.run("grpo", *settings, name="whole")
    assert (
        whole.outcome.steps == 4 and dropped(whole) == ["overlong"] and not whole.notes("warning")
    )
    go_back(whole, 2, "killed")
    killed = ground.run("grpo", *settings, name="killed")
    same_weights(whole, killed)
    assert verify(whole.folder / "ledger.jsonl") == verify(killed.folder / "ledger.jsonl")
