"""Rules of the doctor: each names the fault planted in a run, healthy runs with correlated noise
have none, and users add theirs."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.config import load_config
from distflow.errors import UserError
from distflow.observe.findings.doctor import examine
from distflow.observe.findings.finding import Finding
from distflow.observe.findings.history import History
from distflow.observe.findings.step_rules import (
    STEP_RULES,
    StepRules,
    register_doctor_rule,
    rules_over,
)
from distflow.observe.metrics import find_metric
from distflow.observe.run_records import RunRecords
from distflow.observe.writing.run_folder import RunFolder

Metrics = dict[str, float]
Plant = Callable[[int, Metrics], None]
PLANTED = 130
"""The step at which a fault begins."""


def noise(draw: random.Random, correlation: float) -> Iterator[float]:
    """Correlated noise of variance 1."""
    value = draw.gauss(0, 1)
    while True:
        yield value
        value = correlation * value + math.sqrt(1 - correlation**2) * draw.gauss(0, 1)


def metrics_of(
    num_steps: int, seed: int, correlation: float = 0.8
) -> Iterator[tuple[int, Metrics]]:
    """A run that learns slowly: its reward and length rise, its entropy falls."""
    names = (
        "reward",
        "entropy",
        "length",
        "grad",
        "clip",
        "kl",
        "truncated",
        "equal",
        "memory",
        "k3",
        "val",
    )
    sources = [noise(random.Random(f"{name} {seed}"), correlation) for name in names]

    for step in range(1, num_steps + 1):
        done = step / num_steps
        reward, entropy, length, grad, clip, kl, truncated, equal, memory, k3, val = map(
            next, sources
        )
        yield (
            step,
            {
                "reward/mean_score": 0.4 + 0.3 * done + 0.03 * reward,
                "reward/format/mean": 0.9 + 0.02 * reward,
                "reward/math/mean": 0.4 + 0.3 * done + 0.03 * reward,
                "reward/max": 1.0,
                "reward/min": 0.0,
                "reward/calls": 512.0,
                "reward/error_rate": 0.0,
                "reward/frac_reward_zero_std": min(max(0.3 + 0.04 * equal, 0.0), 1.0),
                "actor/entropy": (0.9 - 0.4 * done) * math.exp(0.05 * entropy),
                "actor/grad_norm": 0.5 * math.exp(0.3 * grad),
                "actor/pg_clipfrac": 0.02 * math.exp(0.3 * clip),
                "actor/ppo_kl": 0.003 * kl,
                "actor/skipped": 0.0,
                "actor/lr": 1e-6,
                "rollout/avg_response_length": (300 + 100 * done) * math.exp(0.04 * length),
                "rollout/truncated": min(max(0.02 + 0.005 * truncated, 0.0), 1.0),
                "mismatch/same_version/k3": 2e-4 * math.exp(0.3 * k3),
                "mismatch/same_version/ess": 0.99,
                "mismatch/older_version/k3": 2e-3 * math.exp(0.3 * k3),
                "async/version_end": step - 1.0,
                "memory/process/rollout": 2.0**30 * (1 + 0.01 * memory),
                "timing_s/step": 10.0,
                **(
                    {"val_correct/all/mean": 0.3 + 0.3 * done + 0.01 * val}
                    if step % 20 == 0
                    else {}
                ),
                **({"canary/mean_abs": 1e-3 * math.exp(0.2 * k3)} if step % 10 == 0 else {}),
            },
        )


def never_updated(step: int, metrics: Metrics) -> None:
    metrics["async/version_end"] = PLANTED - 1.0


def moves(**changes: float | Callable[[float, int], float]) -> Plant:
    """Sets a metric, or computes it from its value and the steps since the fault began. "/" is
    written as "__"."""

    def plant(step: int, metrics: Metrics) -> None:
        for name, change in changes.items():
            key = name.replace("__", "/")
            metrics[key] = (
                change(metrics.get(key, 0.0), step - PLANTED) if callable(change) else change
            )

    return plant


def hack_reward(step: int, metrics: Metrics) -> None:
    metrics["reward/mean_score"] += 0.3
    metrics |= {name: 0.1 for name in ("val_correct/all/mean",) if name in metrics}


def hack_reward_slowly(step: int, metrics: Metrics) -> None:
    metrics["reward/mean_score"] += min(0.006 * (step - PLANTED), 0.25)
    if "val_correct/all/mean" in metrics:
        metrics["val_correct/all/mean"] -= min(0.003 * (step - PLANTED), 0.25)


def spike(step: int, metrics: Metrics) -> None:
    metrics["actor/grad_norm"] *= 100.0 if step == PLANTED else 1.0


FAULTS: dict[str, tuple[str, Plant]] = {
    "rollout-never-updated": ("error", never_updated),
    "weights-differ": ("error", moves(canary__mean_abs=0.3)),
    "mismatch-numerics": ("warning", moves(mismatch__same_version__k3=5e-3)),
    "reward-hacking-suspect": ("warning", hack_reward),
    "reward-hacking-suspect slowly": ("warning", hack_reward_slowly),
    "entropy-collapse": ("warning", moves(actor__entropy=lambda value, since: value * 0.9**since)),
    "policy-broken": (
        "error",
        moves(
            actor__entropy=lambda value, since: value / 100,
            reward__mean_score=lambda value, since: value - 0.4,
            reward__frac_reward_zero_std=1.0,
        ),
    ),
    "policy-broken in part": (
        "error",
        moves(
            actor__entropy=lambda value, since: value / 5,
            reward__mean_score=lambda value, since: value - 0.4,
            reward__frac_reward_zero_std=1.0,
        ),
    ),
    "length-drift": (
        "warning",
        moves(rollout__avg_response_length=lambda value, since: value + 500),
    ),
    "gradient-spike": ("warning", spike),
    "skipped-updates": ("warning", moves(actor__skipped=1.0)),
    "differences-lost": ("warning", moves(reward__lost_in_float64_frac=0.5)),
    "update-too-large": ("warning", moves(actor__pg_clipfrac=0.5)),
    "length-runaway": ("warning", moves(rollout__truncated=0.4)),
    "no-signal": ("warning", moves(reward__frac_reward_zero_std=0.9)),
    "reward-constant": ("error", moves(reward__max=0.0, reward__min=0.0)),
    "nothing-moves": ("error", moves(actor__grad_norm=0.0)),
    "reward-errors": ("error", moves(reward__error_rate=0.3)),
}


def write_run(
    folder: Path,
    plant: Plant = lambda step, metrics: None,
    num_steps: int = 260,
    seed: int = 0,
    end: str = "finished",
) -> Path:
    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {"total_steps": num_steps})
        run.write_text(
            "config.yaml", "data: {max_response_length: 512}\nasync: {max_staleness: 2}\n"
        )

        for step, metrics in metrics_of(num_steps, seed):
            if step >= PLANTED:
                plant(step, metrics)
            run.metrics(step, "train", metrics)

        error = {"errors": ["math: no score within 5 s"], "score": None}
        sizes = ((0.0, 10), (1.0, 500), (0.5, 20))
        run.samples(
            PLANTED,
            [sample(i, score, length) for i, (score, length) in enumerate(sizes)]
            + [sample(3) | error],
        )
        run.event("end", "the run finished", status="finished")

    return folder


def sample(i: int, score: float = 0.0, length: int = 1) -> dict[str, object]:
    facts = {
        "uid": f"7-{i}",
        "prompt": "2 + 3 =",
        "response": "5",
        "score": score,
        "response_length": length,
    }
    return {**facts, "advantage": score - 0.5, "errors": []}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_where_it_begins(name, tmp_path):
    level, plant = FAULTS[name]
    found = {
        each.rule: each
        for each in examine(RunRecords(write_run(tmp_path / "run", plant))).problems()
    }
    rule = name.split()[0]
    assert set(found) == {rule}, found
    assert (
        found[rule].level == level
        and found[rule].text
        and found[rule].advice
        or rule == "reward-errors"
    )
    assert found[rule].first is not None and PLANTED <= found[rule].first < PLANTED + 100
    assert found[rule].numbers


@pytest.mark.parametrize(("head", "number"), [("gaussian", 0), ("action_tokens", 1)])
def test_an_entropy_of_numbers_passes_through_0(head, number):
    """A policy that becomes surer of the numbers of its actions is no sign of a fault."""
    steps = dict(metrics_of(260, 0))
    for step, metrics in steps.items():
        metrics["actor/entropy"] = 0.3 - 0.002 * step
    rollout = {"workflow": "simulator", "workflow_kwargs": {"actions": {"head": head}}}
    config = {"actor_rollout_ref": {"rollout": rollout}}
    found = [each.rule for each in rules_over(steps, config).findings()]
    assert found.count("entropy-collapse") == number, found


def test_samples_that_show_it_are_named(tmp_path):
    def found(name: str) -> Finding:
        (each,) = examine(RunRecords(write_run(tmp_path / name, FAULTS[name][1]))).problems()
        return each

    spiked = found("gradient-spike")
    assert (spiked.first, spiked.last) == (PLANTED, PLANTED) and spiked.is_over
    assert found("reward-errors").uids == ("7-3",)


def test_actions_are_accepted_by_the_config(tmp_path):
    actions = {
        each.action
        for name, (_, plant) in FAULTS.items()
        for each in examine(RunRecords(write_run(tmp_path / name, plant))).problems()
        if each.action
    }
    assert len(actions) > 3

    for action in actions:
        needed = [
            "data.max_response_length=512",
        ]
        load_config("quickstart_grpo", [*needed, action], complete=False)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
)
@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_a_healthy_run_of_a_thousand_steps_has_no_error_and_one_warning_at_most(seed, correlation):
    found = rules_over(
        dict(metrics_of(1000, seed, correlation)), {"async": {"max_staleness": 0}}
    ).findings()
    assert len(found) <= 1 and not any(each.level == "error" for each in found), found


def test_a_healthy_run_of_a_thousand_steps_on_disk(tmp_path, capsys):
    assert main(["doctor", str(write_run(tmp_path / "run", num_steps=1000))]) == 0
    out = capsys.readouterr().out
    assert "no problem found" in out and "idle-workers needs spans" in out


def test_a_finding_opens_after_three_hits_and_closes_after_ten_good_steps():
    rules = StepRules({})
    opened = []
    for step in range(1, 60):
        bad = step in (5, 6) or 20 <= step < 25 or step in (40, 45, 50)
        opened += [
            step
            for _ in rules.step(
                step, {"actor/pg_clipfrac": 0.5 if bad else 0.0, "actor/ppo_kl": 0.0}
            )
        ]

    first, second = rules.findings()
    assert opened == [22, 50]
    assert (first.first, first.last, first.is_over) == (20, 24, True)
    assert (second.first, second.last, second.is_over) == (40, 50, False)


@pytest.fixture
def no_more_rules():
    known = dict(STEP_RULES)
    yield
    STEP_RULES.clear()
    STEP_RULES.update(known)


def test_a_users_rule_is_registered_and_its_error_ends_it_alone(no_more_rules):
    @register_doctor_rule("too-short", ["length"], "error", "Say more.", enough=1)
    def too_short(history: History) -> str | None:
        return "Short." if history.now("length") < 3 else None

    @register_doctor_rule("broken", ["length"], enough=1)
    def broken(history: History) -> str | None:
        raise RuntimeError("odd")

    steps: Mapping[int, Mapping[str, float]] = {step: {"length": 1.0} for step in range(5)}
    rules = rules_over(steps, {})
    (found,) = rules.findings()
    assert (found.rule, found.level, found.text, found.first, found.last) == (
        "too-short",
        "error",
        "Short.",
        0,
        4,
    )
    assert "the doctor rule 'broken' failed: RuntimeError: odd" in rules.lacking()["broken"]
    with pytest.raises(UserError, match="'weights-differ'"):
        register_doctor_rule("weights-differ", [])(too_short)


OWN_RULE = """
from distflow import register_doctor_rule

@register_doctor_rule("my-rule", ["reward/mean_score"], "error", "Do something.")
def my_rule(history):
    return "The reward is low." if history.now("reward/mean_score") < 2 else None
"""


def test_the_command_runs_rules_of_the_run_only_if_trusted(tmp_path, capsys, no_more_rules):
    run_dir = write_run(tmp_path / "run", num_steps=40)
    (tmp_path / "own_rule.py").write_text(OWN_RULE)
    (run_dir / "config.yaml").write_text(f"trainer: {{imports: ['{tmp_path}/own_rule.py']}}\n")
    assert main(["doctor", str(run_dir)]) == 0
    assert "left out: --trust-code" in capsys.readouterr().out
    assert main(["doctor", str(run_dir), "--trust-code", "--json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["rule"] == "my-rule" and found["text"] == "The reward is low."


def test_a_run_that_failed_was_killed_or_hangs(tmp_path, capsys):
    failed = tmp_path / "failed"
    with RunFolder(failed, 0) as run:
        run.write_json("run.json", {})
        run.event("error", "ValueError: \x1b[2Jbad", step=3)
        run.event("end", "the run failed", status="failed")

    assert main(["doctor", str(failed)]) == 2
    assert (
        "error run-failed, step 3\n  The run failed: ValueError: \\x1b[2Jbad"
        in capsys.readouterr().out
    )

    killed = tmp_path / "killed"
    with RunFolder(killed, 0) as run:
        run.write_json("run.json", {})
        run.metrics(1, "train", {"timing_s/step": 1.0})

    assert main(["doctor", str(killed)]) == 1
    assert "warning run-killed" in capsys.readouterr().out


def test_what_a_run_warned_of_is_a_problem(tmp_path, capsys):
    warned = tmp_path / "warned"
    with RunFolder(warned, 0) as run:
        run.write_json("run.json", {})
        run.metrics(0, "val", {"val_correct/all/mean": 0.0})
        run.metrics(1, "train", {"reward/mean_score": 0.0})
        run.event("warning", "the reward counts none of 8 rows' own answers as right")
        run.event("end", "finished", status="finished")

    assert main(["doctor", str(warned)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("1 step of") and "1 warning" in out.splitlines()[0]
    assert "none of 8 rows' own answers" in out


@pytest.mark.parametrize("ends", [True, False])
def test_a_short_run_is_judged_by_what_kept_it_from_learning_once_it_has_ended(ends, tmp_path):
    """As the run says at its end. Others of its findings may still pass."""
    with RunFolder(tmp_path / "run", 0) as run:
        run.event("start", "started")
        for step in (1, 2):
            metrics = {"reward/max": 0.0, "reward/min": 0.0, "rollout/truncated": 0.9}
            run.metrics(step, "train", metrics)
        if ends:
            run.event("end", "finished", status="finished")

    problems = examine(RunRecords(tmp_path / "run")).problems()
    assert [found.rule for found in problems] == ["reward-constant"] * ends


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_lost_differences_have_a_unit_and_a_meaning(kind):
    metric = find_metric(f"reward/lost_in_{kind}_frac")
    assert metric is not None and metric.unit == "share" and metric.doc
