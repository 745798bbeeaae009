"""Keys of `reward`, `trainer`, `trust` and `dag`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.e2e.keys.algorithm import program_is
from tests.e2e.keys.case import (
    Case,
    allowed,
    close,
    differ,
    refused,
    the_config,
    the_policy,
    the_spec,
)
from tests.e2e.keys.lab import ACTOR, MODEL, ROLLOUT, Lab, Run

ONE = "trainer.total_training_steps=1"
THREE = "trainer.total_training_steps=3"
VALIDATED = "data.val_files={lab}/val.jsonl"
SAVING = (THREE, "trainer.save_freq=1", "trainer.keep_last=1", "trainer.test_freq=1", VALIDATED)
OVERLONG = (ONE, "reward.overlong.buffer_tokens=4")
FOR_BEST = (*SAVING, "trainer.keep_best=true", f"{ROLLOUT}.val_kwargs.n=8", f"{ACTOR}.optim.lr=0")
NEVER_FINITE = (f"{ACTOR}.policy_loss=never_finite",)
IMPORTED = "trainer.imports=[tests.e2e.keys.losses]"


def parts_are(before_names: set[str], after_names: set[str]) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, names in ((before, before_names), (after, after_names)):
            assert all(set(row["reward_parts"]) == names for row in run.samples())

    return check


def scores_are_half(before: Run, after: Run) -> None:
    assert (
        {row["score"] for row in after.samples()}
        == {0.5}
        != {row["score"] for row in before.samples()}
    )


def some_time_out(before: Run, after: Run) -> None:
    assert before.column("reward/timeouts") == [0.0] and after.column("reward/timeouts")[0] > 0
    assert after.column("async/dropped/too_few_scores")[0] > 0


def failed_are_given_a_score(before: Run, after: Run) -> None:
    for run, score in ((before, 0.0), (after, -0.5)):
        batch = run.batch()
        failed = torch.tensor([error is not None for error in batch["reward_errors"]])
        assert 0 < int(failed.sum()) < len(batch)
        assert set(batch["scores"][failed].tolist()) == {score}
        assert batch["valid"].tolist() == [not each or run is after for each in failed.tolist()]


def judged_by(before_num: int, after_num: int) -> Callable[[Run, Run], None]:
    """The score is the id of the process."""

    def check(before: Run, after: Run) -> None:
        assert [len({row["score"] for row in run.samples()}) for run in (before, after)] == [
            before_num,
            after_num,
        ]

    return check


def penalty(zone: int, factor: float) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for row in after.samples():
            into = max(0, row["response_length"] - (8 - zone))
            close(row["reward_parts"]["overlong"], -factor * into / zone)
            close(row["score"], row["reward_parts"]["custom"] - factor * into / zone)
        differ(
            [row["score"] for row in before.samples()], [row["score"] for row in after.samples()]
        )

    return check


def checks_are(before_num: int, after_num: int) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        assert [len(run.events("checks")) for run in (before, after)] == [before_num, after_num]

    return check


def weighs_when_apart(before: Any, after: Any) -> None:
    assert [
        ("mismatch_weights" in spec.plan.ranks[0].training_nodes) for spec in (before, after)
    ] == [True, False]


def folder_is(before_end: str, after_end: str) -> Callable[[Any, Any], None]:
    def check(before: Any, after: Any) -> None:
        assert str(before.trainer.run_dir).endswith(before_end) and str(
            after.trainer.run_dir
        ).endswith(after_end)

    return check


def num_steps(before_num: int, after_num: int) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        assert (len(before.steps), len(after.steps)) == (before_num, after_num)

    return check


def only_the_critic_at_first(before: Run, after: Run) -> None:
    assert (before.engine("actor").num_steps, after.engine("actor").num_steps) == (2, 1)
    assert (before.engine("critic").num_steps, after.engine("critic").num_steps) == (2, 2)
    assert "actor/loss" not in after.steps[0] and "actor/loss" in after.steps[1]


def validated_at(before_steps: list[int], after_steps: list[int]) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        assert (list(before.validations), list(after.validations)) == (before_steps, after_steps)

    return check


def saved_at(before_steps: list[int], after_steps: list[int]) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, steps in ((before, before_steps), (after, after_steps)):
            assert run.checkpoints() == [f"step-{step:06d}" for step in steps]

    return check


def models_at(before_steps: list[int], after_steps: list[int]) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, steps in ((before, before_steps), (after, after_steps)):
            found = sorted(
                path.parent.name for path in run.folder.glob("huggingface/*/config.json")
            )
            assert found == [f"step-{step:06d}" for step in steps]

    return check


def best_by(before_metric: str, after_metric: str) -> Callable[[Run, Run], None]:
    """The last checkpoint, and the first of those with the highest metric."""

    def check(before: Run, after: Run) -> None:
        for run, metric in ((before, before_metric), (after, after_metric)):
            best = max(run.validations, key=lambda step: (run.validations[step][metric], -step))
            assert run.checkpoints() == sorted({f"step-{best:06d}", "step-000003"})
        assert before.checkpoints() != after.checkpoints()

    return check


def again(lab: Lab, base: str, changes: Sequence[str]) -> Run:
    """A run of two steps, then another of three in its folder."""
    folder = f"trainer.default_local_dir={{lab}}/again-{len(list(lab.folder.iterdir()))}"
    options = ("trainer.save_freq=1", "trust.check_freq=0", folder)
    lab.run(base, options)
    return lab.run(base, (*changes, THREE, *options))


def goes_on_or_begins_anew(before: Run, after: Run) -> None:
    learned = [sum(forward.trains for forward in run.forwards) for run in (before, after)]
    assert (
        learned == [1, 3]
        and before.engine("actor").num_steps == after.engine("actor").num_steps == 3
    )


def kept_steps(before_steps: list[int], after_steps: list[int]) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, steps in ((before, before_steps), (after, after_steps)):
            files = sorted(path.name for path in (run.folder / "tokens").glob("*.safetensors"))
            assert files == [f"{step:06d}.safetensors" for step in steps]

    return check


def written_for_tensorboard(before: Run, after: Run) -> None:
    assert not list(before.folder.rglob("*tfevents*")) and list(after.folder.rglob("*tfevents*"))


def other_tokens(before: Run, after: Run) -> None:
    assert [row["prompt"] for row in before.samples()] == [row["prompt"] for row in after.samples()]
    assert [row["response"] for row in before.samples()] != [
        row["response"] for row in after.samples()
    ]


def other_device(before: Any, after: Any) -> None:
    if torch.cuda.is_available():
        assert next(after.parameters()).device.type == "cuda"
    else:
        refused("trainer.device")(before, after)


def threads_are(before: Any, after: Any) -> None:
    assert (before.facts["threads"], after.facts["threads"]) == (1, 2)
    torch.set_num_threads(1)


def canary_sang_in(before_steps: list[int], after_steps: list[int]) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, steps in ((before, before_steps), (after, after_steps)):
            assert [n for n, step in enumerate(run.steps, 1) if "canary/mean_abs" in step] == steps

    return check


def stopped_by_skips(before: Run, after: Run) -> None:
    assert before.error is None and before.column("actor/skipped") == [1.0, 1.0]
    assert "1 updates of the actor in a row" in str(after.error)


def finds_what_stands(before: Run, after: Run) -> None:
    assert not before.events("finding")
    assert any("in 1 updates" in event.message for event in after.events("finding"))


def times_each_node(before: Run, after: Run) -> None:
    assert after.steps[0]["perf/actor_train"] > 0 and not any(
        name.startswith("perf/") for name in before.steps[0]
    )


REWARDS = (
    Case(
        "reward.functions",
        "reward.functions.default=[custom,{name: format, weight: 0.5}]",
        "reward parts",
        parts_are({"custom"}, {"custom", "format"}),
        given=(ONE,),
    ),
    Case(
        "reward.timeout_s",
        "reward.timeout_s=0.1",
        "reward/timeouts",
        some_time_out,
        given=(
            *(ONE, "custom_reward_function.name=slow", f"{ROLLOUT}.n=2", "data.shuffle=false"),
            *("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2"),
        ),
    ),
    Case(
        "reward.max_error_rate",
        "reward.max_error_rate=0",
        "the run stops at the first verdict that fails",
        refused("reward.max_error_rate=0"),
        given=(ONE, "custom_reward_function.name=sometimes"),
    ),
    Case(
        "reward.on_error",
        "reward.on_error={score: -0.5}",
        "scores of samples without a verdict",
        failed_are_given_a_score,
        given=(ONE, "custom_reward_function.name=sometimes", "reward.max_error_rate=1"),
    ),
    Case(
        "reward.num_workers",
        "reward.num_workers=2",
        "processes that judge",
        judged_by(1, 2),
        given=(ONE, "custom_reward_function.name=process"),
    ),
    Case(
        "reward.overlong.buffer_tokens",
        OVERLONG[1],
        "scores of long responses",
        penalty(4, 1.0),
        given=(ONE,),
    ),
    Case(
        "reward.overlong.factor",
        "reward.overlong.factor=0.5",
        "those scores",
        penalty(4, 0.5),
        given=OVERLONG,
    ),
    Case(
        "custom_reward_function.path",
        "custom_reward_function.path={lab}/half.py",
        "scores",
        scores_are_half,
        given=(ONE,),
    ),
    Case(
        "custom_reward_function.name",
        "custom_reward_function.name=constant",
        "scores",
        scores_are_half,
        given=(ONE,),
    ),
)
TRAINER = (
    Case(
        "trainer.project_name",
        "trainer.project_name=mine",
        "the folder",
        folder_is("my_project/grpo_training", "mine/grpo_training"),
        look=the_config,
    ),
    Case(
        "trainer.experiment_name",
        "trainer.experiment_name=mine",
        "the folder",
        folder_is("my_project/grpo_training", "my_project/mine"),
        look=the_config,
    ),
    Case(
        "trainer.default_local_dir",
        "trainer.default_local_dir=/x/y",
        "the folder",
        folder_is("grpo_training", "/x/y"),
        look=the_config,
    ),
    Case(
        "trainer.total_epochs",
        "trainer.total_epochs=2",
        "steps",
        num_steps(3, 6),
        given=("trainer.total_training_steps=null", "trainer.total_epochs=1"),
    ),
    Case("trainer.total_training_steps", ONE, "steps", num_steps(2, 1)),
    Case("trainer.stop_when", "trainer.stop_when=async/submitted >= 4", "steps", num_steps(2, 1)),
    Case(
        "trainer.critic_warmup",
        "trainer.critic_warmup=1",
        "updates of the actor",
        only_the_critic_at_first,
        base="ppo",
    ),
    Case(
        "trainer.val_before_train",
        "trainer.val_before_train=true",
        "validations",
        validated_at([], [0]),
        given=(VALIDATED,),
    ),
    Case(
        "trainer.test_freq",
        "trainer.test_freq=1",
        "validations",
        validated_at([2, 3], [1, 2, 3]),
        given=(THREE, VALIDATED, "trainer.test_freq=2"),
    ),
    Case(
        "trainer.test_freq_epochs",
        "trainer.test_freq_epochs=1",
        "validations",
        validated_at([], [3, 4]),
        given=("trainer.total_training_steps=4", VALIDATED),
    ),
    Case(
        "trainer.test_freq_secs",
        "trainer.test_freq_secs=0.001",
        "validations",
        validated_at([], [1, 2, 3]),
        given=(THREE, VALIDATED),
    ),
    Case(
        "trainer.save_freq",
        "trainer.save_freq=2",
        "checkpoints",
        saved_at([], [2, 3]),
        given=(THREE,),
    ),
    Case(
        "trainer.save_freq_epochs",
        "trainer.save_freq_epochs=1",
        "checkpoints",
        saved_at([], [3, 4]),
        given=("trainer.total_training_steps=4",),
    ),
    Case(
        "trainer.save_freq_secs",
        "trainer.save_freq_secs=0.001",
        "checkpoints",
        saved_at([], [2, 3]),
        given=(THREE,),
    ),
    Case(
        "trainer.keep_last",
        "trainer.keep_last=1",
        "checkpoints",
        saved_at([2, 3], [3]),
        given=(THREE, "trainer.save_freq=1"),
    ),
    Case(
        "trainer.keep_best",
        "trainer.keep_best=true",
        "checkpoints",
        saved_at([3], [1, 3]),
        given=SAVING,
    ),
    Case(
        "trainer.keep_best_metric",
        "trainer.keep_best_metric=val_correct/all/mean@8",
        "checkpoints",
        best_by("val_correct/all/mean", "val_correct/all/mean@8"),
        given=FOR_BEST,
    ),
    Case(
        "trainer.save_hf_model",
        "trainer.save_hf_model=true",
        "models",
        models_at([], [3]),
        given=SAVING,
    ),
    Case(
        "trainer.resume_mode",
        "trainer.resume_mode=never",
        "where the run begins",
        goes_on_or_begins_anew,
        look=again,
    ),
    Case(
        "trainer.save_groups", "trainer.save_groups=none", "files of tokens", kept_steps([1, 2], [])
    ),
    Case(
        "trainer.save_groups_last",
        "trainer.save_groups_last=1",
        "files of tokens",
        kept_steps([1, 2], [2]),
        given=("trainer.save_groups=last_k",),
    ),
    Case(
        "trainer.logger",
        "trainer.logger=[tensorboard]",
        "files of the tracker",
        written_for_tensorboard,
        given=(ONE,),
    ),
    Case("trainer.seed", "trainer.seed=2", "tokens", other_tokens, given=(ONE,)),
    Case(
        "trainer.device",
        "trainer.device=cuda",
        "the device, or an error",
        other_device,
        look=the_policy,
    ),
    Case(
        "trainer.num_threads",
        "trainer.num_threads=2",
        "threads of torch",
        threads_are,
        look=the_spec,
    ),
    Case(
        "trainer.imports",
        IMPORTED,
        "names of a user",
        allowed("trainer.imports"),
        given=(ONE, *NEVER_FINITE),
    ),
)
TRUST = (
    Case("trust.check_freq", "trust.check_freq=20", "checked steps", checks_are(0, 2)),
    Case(
        "trust.on_mismatch",
        "trust.on_mismatch=warn",
        "whether the pipeline can weigh a mismatch out",
        weighs_when_apart,
        given=("algorithm.recompute_old_log_probs=true",),
        look=the_spec,
    ),
    Case(
        "trust.canary_freq",
        "trust.canary_freq=2",
        "steps with canary/mean_abs",
        canary_sang_in([1, 2], [2]),
        given=(f"{MODEL}.dtype=bfloat16",),
    ),
    Case(
        "trust.max_skipped_updates",
        "trust.max_skipped_updates=1",
        "when the run stops",
        stopped_by_skips,
        given=(*NEVER_FINITE, IMPORTED),
    ),
    Case(
        "trust.unmoved_after",
        "trust.unmoved_after=1",
        "a finding",
        finds_what_stands,
        given=(f"{ACTOR}.optim.lr=1e-15",),
    ),
    Case(
        "trust.check_rewards",
        "trust.check_rewards=true",
        "answers that do not match themselves are found",
        refused("data.answer_key"),
        given=(
            *(ONE, "reward.functions.default=[exact_match]", "custom_reward_function.path=null"),
            "data.train_files={lab}/unmarkable.jsonl",
        ),
    ),
)
DAG = (
    Case(
        "dag.pipeline",
        "dag.pipeline=dapo",
        "the pipeline",
        program_is("grpo_training_pipeline", "dapo_training_pipeline"),
        given=(ONE,),
    ),
    Case(
        "dag.pipeline",
        "dag.pipeline=distflow.pipelines.dapo:dapo_pipeline",
        "the pipeline",
        program_is("grpo_training_pipeline", "dapo_training_pipeline"),
        given=(ONE,),
    ),
    Case("dag.enable_perf", "dag.enable_perf=true", "perf/*", times_each_node, given=(ONE,)),
)
CASES = (*REWARDS, *TRAINER, *TRUST, *DAG)
