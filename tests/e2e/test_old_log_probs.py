"""Old log-probs without a forward pass of their own: where that is sound, trains the same, and is
proven."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms.mismatch_check import Tolerance
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.graph import BoundPipeline
from distflow.pipelines.nodes.scored_tokens import score_policy
from distflow.training.torch_engine import TorchScorer
from tests.e2e.runs import Playground, Run

ACTOR = "actor_rollout_ref.actor"
CHECKED = ("trust.check_freq=1", "trainer.total_training_steps=3")
KEPT = ("trainer.save_freq=3", "trainer.save_groups=all", *CHECKED)
RECOMPUTES = "algorithm.recompute_old_log_probs=true"


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


def tokens(run: Run, step: int) -> Batch:
    return Batch.load(run.folder / "tokens" / f"{step:06d}.safetensors")


def same_run(one: Run, other: Run) -> None:
    """Weights, metrics and old log-probs after three steps, within what float32 rounds."""
    for (name, weight), wanted in zip(
        one.weights(3).items(), other.weights(3).values(), strict=True
    ):
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-7, msg=name)

    for mine, theirs in zip(one.metrics(), other.metrics(), strict=True):
        compared = {name for name in theirs if name.startswith(("actor/", "mismatch/", "reward/"))}
        assert compared <= mine.keys()
        for name in compared:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name

    for step in (1, 2, 3):
        found = tokens(one, step).flat("old_log_probs")
        wanted = tokens(other, step).flat("old_log_probs")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_it_trains_what_a_pass_of_its_own_does(playground, preset):
    more = ("algorithm.use_kl_in_reward=false",) if preset == "ppo" else ()
    left_out = playground.run(preset, *KEPT, *more, name="auto")
    assert not scores(left_out.folder, playground, preset, more)
    same_run(left_out, playground.run(preset, *KEPT, *more, RECOMPUTES, name="true"))


def scores(folder: Path, playground: Playground, preset: str, overrides: tuple[str, ...]) -> bool:
    """Whether the pipeline of these overrides has a forward pass for old log-probs."""
    return score_policy in functions(
        playground.spec(preset, *overrides, name=f"{folder.name}-spec")[1].pipeline()
    )


def functions(pipeline: BoundPipeline) -> list[Any]:
    return [node.fn for node in pipeline.nodes]


@pytest.mark.slow
def test_the_rollouts_own_may_be_taken(playground):
    run = playground.run(
        "grpo", *KEPT, "algorithm.recompute_old_log_probs=false", f"{ACTOR}.ppo_mini_batch_size=2"
    )
    assert any("loss" in note.partition("not checked")[0] for note in run.notes("checks"))
    batch = tokens(run, 2)
    assert torch.equal(batch.flat("old_log_probs"), batch.flat("rollout_log_probs"))
    scored = ~batch["trainer_log_probs"][:, 0].isnan()
    assert int(scored.sum()) == 8 and run.metrics()[1]["mismatch/same_version/share"] == 1


def test_a_loss_that_is_given_other_log_probs_is_found(playground, monkeypatch):
    """They are the old ones too, which nothing else computes."""
    compute = TorchScorer.compute

    def moved(self: TorchScorer, micro: Batch, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        found = compute(self, micro, outputs)
        return (
            {**found, "log_probs": found["log_probs"] - 0.01} if torch.is_grad_enabled() else found
        )

    monkeypatch.setattr(TorchScorer, "compute", moved)
    with pytest.raises(TrustError, match="log_probs .* actor's loss"):
        playground.run(
            "grpo", *CHECKED, spoil=lambda spec: replace(spec, tolerance=Tolerance(1.0, 1.0))
        )
