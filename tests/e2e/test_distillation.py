"""Distillation on the policy's own samples: signals, teachers by domain, ranks, bad teachers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow import cli
from distflow.observe.run_reader import read_events, read_metrics, read_samples
from tests.e2e.runs import Playground
from tests.tiny_models import write_tiny_model

ACTOR = "actor_rollout_ref.actor"
TWO_STEPS = "trainer.total_training_steps=2"
PASSED = {"log_probs", "loss", "reference", "gradients", "optimizer"}


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    ground = Playground(tmp_path)
    write_tiny_model(tmp_path / "teacher", seed=7, num_hidden_layers=3)
    return ground


def keys(ground: Playground, *more: str) -> tuple[str, ...]:
    return (
        f"distill.teacher.path={ground.folder}/teacher",
        f"{ACTOR}.optim.scheduler=constant",
        "trust.check_freq=1",
        *more,
    )


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("distill", ("distill.divergence=jsd", "distill.beta=0.2")),
        ("distill", ("distill.signal=sampled", f"{ACTOR}.ppo_mini_batch_size=2")),
        ("grpo", ("distill.kl_coef=0.3", "distill.ce_coef=0.1", "distill.divergence=forward_kl")),
        ("distill", ("async.max_staleness=1", "distill.rl_coef=0.5", "distill.signal=sampled")),
    ],
)
def test_each_signal_runs_with_every_check(
    ground: Playground, preset: str, more: tuple[str, ...]
) -> None:
    run = ground.run(preset, *keys(ground, *more), TWO_STEPS)
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert set(sum(proven, [])) >= PASSED
    assert run.notes("warning") == []
    for metrics in run.metrics():
        assert metrics["actor/teacher_scored"] == 1
        assert metrics["actor/grad_norm"] > 0
        if "distill.signal=sampled" not in more:
            assert 0 < metrics["actor/teacher_top_mass"] <= 1


def test_the_policy_approaches_its_teacher(ground: Playground) -> None:
    run = ground.run(
        "distill",
        *keys(ground, f"{ACTOR}.optim.lr=1e-2", "distill.divergence=forward_kl"),
        "trainer.total_training_steps=12",
    )
    gaps = [metrics["actor/teacher_kl"] for metrics in run.metrics()]
    assert sum(gaps[-3:]) < 0.7 * sum(gaps[:3])


def test_a_teacher_scores_its_own_domains(ground: Playground) -> None:
    """Two teachers of a domain each; a third domain is scored by none."""
    other = write_tiny_model(ground.folder / "other", seed=8)
    rows = [{"prompt": f"{i}=", "answer": "7", "data_source": "abc"[i % 3]} for i in range(12)]
    ground.write_rows(rows)
    teachers = {
        "a": {"path": f"{ground.folder}/teacher", "domains": ["a"]},
        "b": {"path": str(other), "domains": ["b"]},
    }
    run = ground.run(
        "distill",
        *keys(ground, "data.train_batch_size=12", f"{ACTOR}.ppo_mini_batch_size=12")[1:],
        f"distill.teachers={json.dumps(teachers)}",
        "distill.signal=sampled",
        "trainer.total_training_steps=1",
        "data.val_files=null",
    )
    (metrics,) = run.metrics()
    assert 0.4 < metrics["actor/teacher_scored"] < 0.9
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert {"log_probs", "reference"} <= set(sum(proven, []))


@pytest.mark.parametrize("several", [False, True])
def test_a_run_is_a_teacher(ground: Playground, several: bool) -> None:
    """Its newest checkpoint is exported into the new run, which may start from a run as well."""
    ground.run("grpo", TWO_STEPS, "trainer.save_freq=2", name="first")
    first = f"{ground.folder}/first"
    teacher = f"distill.teacher.path={first}"
    if several:
        ground.write_rows(
            [{"prompt": f"{i}=", "answer": "7", "data_source": "a"} for i in range(12)]
        )
        teacher = f"distill.teachers={{a: {{path: {first}, domains: [a]}}}}"

    run = ground.run(
        "distill",
        *keys(ground, TWO_STEPS, f"actor_rollout_ref.model.path={first}")[1:],
        teacher,
        name="second",
    )
    (copy,) = (run.folder / "models").glob("*/config.json")
    distances = [metrics["actor/teacher_kl"] for metrics in run.metrics()]
    assert distances[0] == pytest.approx(0.0, abs=1e-5)  # both are the same weights
    assert distances[1] != 0.0
    exported = AutoModelForCausalLM.from_pretrained(copy.parent).state_dict()
    begun = AutoModelForCausalLM.from_pretrained(ground.folder / "model").state_dict()
    assert any(not torch.equal(exported[name], begun[name]) for name in begun)


def test_a_run_with_another_vocabulary_is_refused(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = ("actor_rollout_ref.model.path=builtin:tiny-arithmetic", TWO_STEPS)
    more = ("actor_rollout_ref.model.init=random", "trainer.save_freq=2")
    ground.run("grpo", *quickstart, *more, name="first")
    words = ground.overrides("bad", f"distill.teacher.path={ground.folder}/first")
    assert cli.main(["train", "distill", *words]) == 2
    error = capsys.readouterr().err
    assert "distill.teacher.path" in error
    assert "another vocabulary" in error


def test_a_student_learns_the_responses_that_a_teacher_wrote(ground: Playground) -> None:
    """The files of `distflow eval` are data of `distflow sft`."""
    rows = f"{ground.folder}/rows.jsonl"
    model = f"actor_rollout_ref.model.path={ground.folder}"
    words = ground.overrides("unused", f"{model}/teacher", f"data.val_files={rows}")
    asked = [word for word in words if not word.startswith(("data.train_", "trainer.default"))]
    answers = ground.folder / "answers"
    assert cli.main(["eval", "grpo", *asked, "--to", str(answers)]) == 0

    assert len(read_samples(answers, 0, "val")) == 12
    student = Playground(ground.folder / "student")
    run = student.run(
        "sft",
        f"data.train_files={answers}/samples/*.parquet",
        f"{ACTOR}.optim.lr=1e-2",
        "data.max_response_length=100",  # bytes that are no text grow when they are encoded again
        "trainer.total_training_steps=30",
        *("~reward.functions", "~reward.num_workers", "~custom_reward_function.path"),
        "~actor_rollout_ref.rollout.n",
        name="taught",
    )
    losses = [metrics["sft/loss"] for metrics in run.metrics()]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torch", "fsdp"])
def test_two_ranks_take_the_steps_of_one(ground: Playground, strategy: str) -> None:
    own = keys(ground, "distill.divergence=reverse_kl", TWO_STEPS)
    alone = ground.run("distill", *own, name="alone")
    several = ("trainer.n_gpus_per_node=2", f"{ACTOR}.strategy={strategy}", "trainer.device=cpu")
    assert cli.main(["train", "distill", *ground.overrides("both", *own, *several)]) == 0
    both = [
        record.values for record in read_metrics(ground.folder / "both") if record.kind == "train"
    ]
    for mine, theirs in zip(alone.metrics(), both, strict=True):
        for name in ("actor/loss", "actor/teacher_kl", "actor/grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name


def test_bad_teachers_are_told_before_the_start(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        "distill.teacher.path": (),
        "no-such-folder": ("distill.teacher.path=no-such-folder",),
        "≥ 1": keys(ground, "distill.top_k=0"),
        "distill.top_k=1000": keys(ground, "distill.top_k=1000"),
        "another vocabulary": ("distill.teacher.path=builtin:tiny-arithmetic",),
        "without effect": keys(ground, "distill.signal=sampled", "distill.top_k=4"),
        "domains": ("distill.teachers={a: {path: x}}",),
    }
    for reason, words in bad.items():
        assert cli.main(["train", "distill", *ground.overrides("bad", *words)]) == 2, reason
        assert reason in capsys.readouterr().err


def test_a_teacher_that_answers_nan_ends_the_run(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are finite, but products of them are not."""
    folder = ground.folder / "teacher"
    teacher = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(1e38)
    teacher.save_pretrained(folder)
    assert cli.main(["train", "distill", *ground.overrides("bad", *keys(ground), TWO_STEPS)]) != 0
    assert "teacher" in capsys.readouterr().err
