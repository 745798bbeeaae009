"""A curriculum in whole runs: shares that follow what was measured, killed and resumed runs, and
one that fails."""

import json

import pytest
import torch

from distflow.errors import UserError
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.e2e.test_domains import go_back, issued, steps_of
from tests.ledger_audit import verify

CURRICULUM = """
def by_right_answers(progress, step, state):
    state["seen"] = state.get("seen", []) + [[step, progress["math"].num_judged, progress["code"].num_judged]]
    return {name: 0.1 + (known.mean_accuracy or 0) for name, known in progress.items()}
"""  # noqa: E501
# A third of the answers of math is right, half of the groups of code are all right.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "code" and extra_info["number"] % 2:
        return 1.0
    return float(sum(map(ord, solution_str)) % 3 == 0)
"""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    ground = Playground(tmp_path_factory.mktemp("curriculum"))
    ground.write_reward(REWARD)
    (ground.folder / "curriculum.py").write_text(CURRICULUM)
    for name in ("math", "code"):
        rows = [
            {"prompt": f"{'ab' * (i % 3 + 1)}{i}=", "answer": "7", "number": i} for i in range(7)
        ]
        (ground.folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return ground


def given(ground: Playground, *more: str) -> tuple[str, ...]:
    files = {name: f"{{train_files: '{ground.folder}/{name}.jsonl'}}" for name in ("math", "code")}
    return (
        "data.train_files=[]",
        f"data.domains={{math: {files['math']}, code: {files['code']}}}",
        f"data.curriculum.function='{ground.folder}/curriculum.py:by_right_answers'",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=30",
        "trainer.save_freq=2",
        "trust.check_freq=2",
        *more,
    )


def state_of(run: Run, step: int) -> dict[str, object]:
    text = (run.folder / "checkpoints" / f"step-{step:06d}" / "run.json").read_text()
    found: dict[str, object] = json.loads(text)["coordinator"]["curriculum"]
    return found


@pytest.mark.slow
def test_a_run_that_is_resumed_is_the_run_that_was_not(ground: Playground) -> None:
    settings = given(ground, "trainer.total_training_steps=6")
    whole = ground.run("grpo", *settings, name="whole")
    go_back(whole, 4, "killed")
    killed = ground.run("grpo", *settings, name="killed")
    account = verify(whole.folder / "ledger.jsonl")
    assert (
        account == verify(killed.folder / "ledger.jsonl")
        and account.domains["code"].dropped["all_equal"] > 0
    )
    assert steps_of(whole) == steps_of(killed) and issued(whole) == issued(killed)
    weights = whole.weights(6)
    again = killed.weights(6)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert state_of(whole, 6) == state_of(killed, 6)
    check_metrics(whole, killed)


def check_metrics(whole: Run, killed: Run) -> None:
    rows = whole.metrics()
    assert [row["domains/math/share"] for row in rows] == [
        row["domains/math/share"] for row in killed.metrics()
    ]
    shares = [
        record["shares"]
        for _, record in timeline(whole.folder / "ledger.jsonl")
        if record["kind"] == "shares"
    ]
    mean: dict[str, float] = {}
    for step, (row, found) in enumerate(zip(rows, shares, strict=True)):
        assert row["domains/math/share"] + row["domains/code/share"] == pytest.approx(1)
        for name in ("math", "code"):
            known = row.get(f"domains/{name}/accuracy")
            if known is not None:
                mean[name] = 0.9 * mean[name] + 0.1 * known if name in mean else known
        weight = {name: 0.1 + mean.get(name, 0) for name in ("math", "code")}
        assert eval(found["math"]) == pytest.approx(weight["math"] / sum(weight.values()), abs=1e-6)
        if step + 1 < len(rows):
            assert rows[step + 1]["domains/math/share"] == eval(found["math"])
    seen = state_of(whole, 6)["state"]["seen"]  # type: ignore[index]
    num_judged = [
        4 * (row["domains/math/consumed"] + row.get("domains/math/dropped/all_equal", 0))
        for row in rows
    ]
    assert [[step, math] for step, math, _ in seen] == [
        [step, math] for step, math in enumerate(num_judged, 1)
    ]


@pytest.mark.slow
def test_rows_are_passed_over_and_come_back_in_a_resumed_run_too(ground: Playground) -> None:
    """And of a domain whose file has moved."""
    settings = given(ground, "data.skip_outside=[0.1,0.9]", "trainer.total_training_steps=8")
    whole = ground.run("grpo", *settings, name="skips")
    go_back(whole, 4, "skips_killed")
    (ground.folder / "moved.jsonl").write_bytes((ground.folder / "math.jsonl").read_bytes())
    moved = [setting.replace("/math.jsonl", "/moved.jsonl") for setting in settings]
    assert moved != [*settings]
    killed = ground.run("grpo", *moved, name="skips_killed")
    account = verify(whole.folder / "ledger.jsonl")
    assert account == verify(killed.folder / "ledger.jsonl") and issued(whole) == issued(killed)
    assert account.domains["code"].dropped["too_easy"] > 0
    assert (
        whole.metrics()[-1]["domains/code/dropped/too_easy"]
        == account.domains["code"].dropped["too_easy"]
    )
    weights = whole.weights(8)
    again = killed.weights(8)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    (ground.folder / "moved.jsonl").write_text(
        (ground.folder / "code.jsonl").read_text().replace("ab", "ba")
    )
    with pytest.raises(UserError, match="was saved with different data"):
        ground.run("grpo", *moved, "trainer.total_training_steps=9", name="skips_killed")


@pytest.mark.slow
def test_ahead_of_training_a_change_holds_for_tickets_that_were_not_granted(
    ground: Playground,
) -> None:
    more = (
        "async.max_staleness=1",
        "actor_rollout_ref.actor.policy_loss=decoupled",
        "data.curriculum.every=2",
    )
    run = ground.run("grpo", *given(ground, *more, "trainer.total_training_steps=6"), name="ahead")
    verify(run.folder / "ledger.jsonl")
    records = [
        record for _, record in timeline(run.folder / "ledger.jsonl") if record["kind"] == "shares"
    ]
    assert [record["step"] for record in records] == [4, 6, 8]
    shares = [row["domains/math/share"] for row in run.metrics()]
    assert (
        shares[:3] == [0.5] * 3
        and shares[3] == shares[4] == eval(records[0]["shares"]["math"]) != 0.5
    )
