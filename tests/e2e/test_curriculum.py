"""A curriculum in whole runs: shares that follow what was measured, killed and resumed runs, and
one that fails."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.errors import TrustError, UserError
from distflow.launch.one_process_launcher import launch_local
from distflow.observe.run_reader import read_events
from distflow.runtime.spec import LaunchOptions
from distflow.scheduling import curriculum_and_difficulty_filter as curriculum
from distflow.scheduling.domain_quotas import Quotas
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run, notes
from tests.e2e.test_domains import go_back, issued, steps_of
from tests.ledger_audit import verify
from tests.sparse_params import one_fast_in

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
        "trust.audit_freq=2",
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


@pytest.mark.slow
def test_one_that_fails_ends_the_run_and_costs_no_checkpoint(
    ground: Playground, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def weights(progress, step, state):\n"
        "    return {'math': 1, 'code': -1 if step == 3 else 1}\n"
    )
    settings = given(
        ground, f"data.curriculum.function='{file}:weights'", "trainer.total_training_steps=4"
    )
    with pytest.raises(
        UserError, match=r"mine.py:weights: after step 3 the curriculum gave 'code' the weight -1"
    ):
        ground.run("grpo", *settings, name="fails")
    assert sorted(
        path.name for path in (ground.folder / "fails" / "checkpoints").glob("step-*")
    ) == ["step-000002"]
    moved = tmp_path / "mended.py"
    moved.write_text("def weights(progress, step, state):\n    return {'math': 1, 'code': 1}\n")
    with pytest.raises(UserError, match="--allow-change data.curriculum.function"):
        ground.run(
            "grpo", *given(ground, f"data.curriculum.function='{moved}:weights'"), name="fails"
        )


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "_moved", lambda before, now, smoothing: now)


def follows_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    def learnability(progress: Any, step: int, state: dict[str, Any]) -> dict[str, float]:
        return {name: known.weight * (known.accuracy or 0.5) for name, known in progress.items()}

    monkeypatch.setattr(curriculum, "load_curriculum", lambda name: learnability)


def counts_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    original = curriculum.Curriculum.count

    def count(self: curriculum.Curriculum, domain: str, group: curriculum.Accuracy) -> None:
        original(self, "math", group)

    monkeypatch.setattr(curriculum.Curriculum, "count", count)


def hands_out_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quotas, "_take", lambda self: 0)


def tells_half_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    original = curriculum._Measured.progress

    def progress(self: Any, *given: Any) -> Any:
        told, after = original(self, *given)
        return replace(told, accuracy=None if told.accuracy is None else told.accuracy / 2), after

    monkeypatch.setattr(curriculum._Measured, "progress", progress)


FAULTS = {
    forgets: "share",
    follows_accuracy: "share",
    counts_one_domain: "was told",
    hands_out_equal_shares: "has had",
    tells_half_the_accuracy: "was told the accuracy",
}


def learnable(ground: Playground, *more: str) -> tuple[str, ...]:
    settings = given(
        ground, "algorithm.filter_groups.enable=false", "trainer.total_training_steps=8", *more
    )
    return *settings, "data.curriculum.function=learnability"


@pytest.mark.parametrize("fault", one_fast_in(4, FAULTS))
def test_shares_that_are_not_those_of_the_groups_are_found(
    ground: Playground, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    with pytest.raises(
        TrustError, match=rf"the audit of step \d+ found \(curriculum\): .*{FAULTS[fault]}"
    ):
        ground.run("grpo", *learnable(ground), name=fault.__name__)


@pytest.mark.slow
def test_what_a_curriculum_is_told_of_several_steps_is_found(
    ground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts_one_domain(monkeypatch)
    with pytest.raises(TrustError, match=r"the audit of step 2 found \(curriculum\): .*was told"):
        ground.run("grpo", *learnable(ground, "data.curriculum.every=2"), name="of-several-steps")


HEALTHY = {
    "plain": (),
    "every-two": ("data.curriculum.every=2",),
    "ahead": ("async.max_staleness=2",),
    "filtered": ("data.curriculum.every=2", "algorithm.filter_groups.enable=true"),
}


@pytest.mark.slow
def test_a_run_that_was_resumed_without_audits_is_not_compared_with_what_was_before(
    ground: Playground,
) -> None:
    for steps, audit_freq in ((2, 2), (4, 0), (6, 2)):
        more = (f"trainer.total_training_steps={steps}", f"trust.audit_freq={audit_freq}")
        _, spec = ground.spec("grpo", *learnable(ground, *more), name="gap")
        assert launch_local(spec, LaunchOptions(allow_change=("trust.audit_freq",))).steps == steps
    assert not any(
        "audit" in note
        for kind in ("warning", "finding")
        for note in notes(ground.folder / "gap", kind)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_shares_of_a_healthy_run_are_proven_in_every_step(ground: Playground, name: str) -> None:
    settings = learnable(ground, *HEALTHY[name])
    name = f"healthy-{name}"
    whole = ground.run("grpo", *settings, name=name)
    looks = [event for event in read_events(whole.folder) if event.kind == "looks"]
    assert sum(dict(event.fields["checks"])["curriculum"] for event in looks) == 7, (
        "of the last step nothing is told"
    )
    go_back(whole, 4, f"{name}-again")
    again = ground.run("grpo", *settings, name=f"{name}-again")
    assert again.notes("end")[-1] == "the run finished"
