"""Every metric of the table is computed again by a check, or says why not; one that is reported
wrongly is found."""

import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from distflow.algorithms import mismatch_check
from distflow.audit.audited_step.node_and_queue_metrics import NOT_RECOMPUTED
from distflow.audit.auditor import Auditor
from distflow.errors import TrustError
from distflow.observe import metrics
from distflow.pipelines.nodes import advantages
from distflow.runtime import step_metrics
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow
BY_OTHER_CHECKS = {
    **dict.fromkeys(("val_correct/*", "sft/val_loss", "rm/val_*"), "validation"),
    **dict.fromkeys(("domains/*/share", "domains/*/learnability", "domains/*"), "curriculum"),
    **dict.fromkeys(("*/lr", "*/grad_norm"), "optimizer and gradients"),
    "async/*": "counts of groups that the ledger makes twice",
    "actor/reward_kl_penalty/*": "kl_control, by domain",
    "actor/kl_coef/*": "kl_control, by domain",
    "reward/errors/*": "as reward/errors",
}
TWO = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2")
NORM = (f"algorithm.reward_norm.{level}_level=running" for level in ("mean", "std"))
MASKS = (
    "algorithm.adv_estimator=reinforce",
    "algorithm.mask_truncated=true",
    "algorithm.reward_clip=0.4",
    *NORM,
)
CORRECTION = (
    "algorithm.recompute_old_log_probs=true",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs=[token_k1, seq_mean_k3, seq_max_k2]",
    "algorithm.rollout_correction.rollout_rs_threshold=[1.001, 0.01, 0.01]",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    "actor_rollout_ref.model.dtype=bfloat16",
)
WORKFLOW = ("actor_rollout_ref.rollout.workflow=multi_turn", "data.max_response_length=60")
RUNS = {
    "grpo": ("grpo", *TWO, "actor_rollout_ref.actor.use_kl_loss=true"),
    "ppo": ("ppo", *TWO),
    "masks": ("grpo", *MASKS, "algorithm.advantage_clip=0.2", "algorithm.mask_long_errors=8"),
    "correction": ("grpo", *CORRECTION),
    "ahead": ("grpo", "async.max_staleness=2", "data.max_response_length=30"),
    "decoupled": ("async_grpo", "async.max_staleness=2"),
    "episodes": ("grpo", *WORKFLOW, "actor_rollout_ref.rollout.stop=[a,b,c,d,e]"),
}


def test_each_metric_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, logged, released = set[str](), set[str](), Auditor.step_released

    def seen(self: Auditor, *more: Any) -> None:
        released(self, *more)
        compared.update(self._run.compared)

    monkeypatch.setattr(Auditor, "step_released", seen)
    ground = Playground(tmp_path)
    for name, keys in RUNS.items():
        run = ground.run(*keys, "trainer.total_training_steps=3", name=name)
        assert [note for note in run.notes("warning") if "audit" in note] == []
        assert not any("nothing computes" in note for note in run.notes("info")), name
        logged |= {metric for step in run.metrics() for metric in step}
    known = [*NOT_RECOMPUTED, *BY_OTHER_CHECKS]
    left = {
        name
        for name in logged - compared
        if not any(fnmatchcase(name, pattern) for pattern in known)
    }
    assert not left
    table = tomllib.loads(Path(str(metrics.__file__)).with_name("metrics.toml").read_text())
    # by the same code
    without_runs = ("sft/*", "rm/*", "reward/*", "*/*/*", "async/version_diff/*", "policies/*")
    # of other runs and losses
    without_runs += ("srpo/*", "val/*", "actor/cov_selected", "actor/policy_drift")
    of_table = {
        entry
        for entry in table
        if not any(fnmatchcase(entry, pattern) for pattern in (*known, *without_runs))
    }
    assert not {
        entry for entry in of_table if not any(fnmatchcase(name, entry) for name in compared)
    }


def swapped(
    owner: Any, name: str, change: Callable[[Any], Any]
) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


WRONG = {
    "reward_clip/clipped": (
        "masks",
        swapped(advantages, "_share", lambda of: lambda hit, counted: of(~hit, counted)),
    ),
    "mismatch/ess": (
        "correction",
        swapped(
            mismatch_check,
            "mismatch_statistics",
            lambda of: (
                lambda *rest: {
                    name: value / (2 if name == "ess" else 1) for name, value in of(*rest).items()
                }
            ),
        ),
    ),
    "async/rejected": (
        "grpo",
        swapped(
            step_metrics,
            "group_metrics",
            lambda of: lambda *rest: {**of(*rest), "async/rejected": 3.0},
        ),
    ),
}


@pytest.mark.parametrize("metric", WRONG)
def test_one_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    run, plant = WRONG[metric]
    plant(monkeypatch)
    if metric == "async/rejected":
        monkeypatch.setattr("distflow.runtime.worker.group_metrics", step_metrics.group_metrics)
    with pytest.raises(TrustError, match=rf"the metric {metric}.* is reported as"):
        Playground(tmp_path).run(*RUNS[run], "trainer.total_training_steps=4")
