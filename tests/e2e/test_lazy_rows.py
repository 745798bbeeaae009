"""Runs that read a row when its group starts: the same run as with all rows read at the start."""

import gzip
import json

import numpy as np
import pytest
import torch

from distflow.errors import UserError
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.e2e.test_domains import go_back
from tests.ledger_audit import verify

pytestmark = pytest.mark.slow
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trust.check_freq=1")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    ground = Playground(tmp_path_factory.mktemp("lazy"))
    good = (ground.folder / "rows.jsonl").read_text()
    (ground.folder / "long.jsonl").write_text(
        good + json.dumps({"prompt": "x" * 40, "answer": "7"}) + "\n"
    )
    more = [json.dumps({"prompt": f"{i}=", "answer": "7", "response": "7"}) for i in range(256)]
    lines = [
        json.dumps({"prompt": f"{'ab' * (i % 4 + 1)}{i}=", "answer": "7"}) + "\n" for i in range(9)
    ]
    for name, part in (("1.jsonl", lines[:4]), ("2.jsonl.gz", lines[4:6]), ("3.jsonl", lines[6:])):
        (ground.folder / "parts").mkdir(exist_ok=True)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(ground.folder / "parts" / name, "wt") as file:
            file.write("".join(part))
    (ground.folder / "folder").mkdir()
    (ground.folder / "folder" / "rows.jsonl").write_text("".join(lines))
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


def test_a_run_reads_the_same_rows_in_the_same_order(ground: Playground) -> None:
    eager = ground.run("grpo", *STEPS, name="eager")
    lazy = ground.run("grpo", *STEPS, "data.lazy=true", name="lazy")
    same_weights(eager, lazy)
    checks = lazy.notes("checks")
    assert checks == eager.notes("checks") and len(checks) >= 4 and not lazy.notes("warning")


def test_a_row_that_is_left_out_is_replaced_and_a_killed_run_goes_on_as_if_it_was_not(
    ground: Playground,
) -> None:
    settings = (*STEPS, f"data.train_files={ground.folder}/long.jsonl", "data.lazy=true")
    whole = ground.run("grpo", *settings, name="whole")
    assert (
        whole.outcome.steps == 4 and dropped(whole) == ["overlong"] and not whole.notes("warning")
    )
    go_back(whole, 2, "killed")
    killed = ground.run("grpo", *settings, name="killed")
    same_weights(whole, killed)
    assert verify(whole.folder / "ledger.jsonl") == verify(killed.folder / "ledger.jsonl")


def test_rows_of_unknown_number_are_the_same_in_any_form_and_after_a_kill(
    ground: Playground,
) -> None:
    """Nine rows, of which 16 groups are made, drawn from the first window of a stream by its own
    definition."""
    settings = (*STEPS, "data.lazy=true")
    whole = ground.run(
        "grpo", *settings, f"data.train_files={ground.folder}/parts/*", name="stream"
    )
    assert len(whole.notes("checks")) >= 4 and not whole.notes("warning")
    issued = [
        record
        for _, record in timeline(whole.folder / "ledger.jsonl")
        if record["kind"] == "issued"
    ]
    order = np.argsort(
        np.random.Philox(key=[1, 0], counter=[0, 0, 0, 0]).random_raw(1024), kind="stable"
    )
    assert [record["row"] for record in issued] == order[:16].tolist()
    assert {record["epoch"] for record in issued} == {0}
    as_folder = ground.run(
        "grpo", *settings, f"data.train_files={ground.folder}/folder", name="as_folder"
    )
    same_weights(whole, as_folder)
    go_back(whole, 2, "killed_stream")
    killed = ground.run(
        "grpo", *settings, f"data.train_files={ground.folder}/parts/*", name="killed_stream"
    )
    same_weights(whole, killed)
    assert verify(whole.folder / "ledger.jsonl") == verify(killed.folder / "ledger.jsonl")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ("trainer.total_training_steps=null",),
            "trainer.total_epochs: .* set trainer.total_training_steps",
        ),
        (
            ("trainer.save_freq_epochs=1",),
            "trainer.save_freq_epochs: .* set trainer.save_freq, in steps",
        ),
        (("data.skip_outside=[0.1, 0.9]",), "data.skip_outside: .* remove it"),
    ],
)
def test_what_counts_epochs_is_refused_where_their_length_is_unknown(
    ground: Playground, changes: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        ground.spec(
            "grpo", *STEPS, "data.lazy=true", f"data.train_files={ground.folder}/parts/*", *changes
        )
