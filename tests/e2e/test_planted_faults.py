"""Faults that make other systems train on nonsense in silence, planted into real runs: each is
caught and named."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from distflow import cli
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.rollout import engine_weights
from distflow.rollout.embedded.prompt_cache import PromptCache
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.spec import Spec
from distflow.scheduling.group_states import CountsError
from distflow.scheduling.sample_queue import SampleQueue
from distflow.training.torch_engine import TorchTrainEngine
from tests.e2e.planting import plant_before_update, plant_in_group
from tests.e2e.runs import Playground, notes
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = pytest.mark.slow
GRPO = ["grpo", "trainer.total_training_steps=3"]
# by a forward pass of the trainer before the update
SCORED = ["algorithm.recompute_old_log_probs=true"]
FAST = ["actor_rollout_ref.actor.optim.lr=3e-2", "actor_rollout_ref.actor.optim.scheduler=constant"]
BFLOAT16 = "actor_rollout_ref.model.dtype=bfloat16"
Patch = pytest.MonkeyPatch
SHIFTED = r"moved by a token|\(versions\): .* log-probs of the tokens of sample"
"""In float32 the checks of the step is there before its end, where all tokens of the step are
compared."""


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


def change(column: str, rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Batch], None]:
    def changed(batch: Batch) -> None:
        batch[column] = rule(batch[column])

    return changed


def shifted(values: torch.Tensor) -> torch.Tensor:
    return values.roll(1, dims=-1)


def off_by_one(mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (1, 0))[:, :-1]


@pytest.mark.parametrize("plane", ["rollout", "training"])
def test_a_response_mask_that_is_off_by_one(playground, monkeypatch, plane):
    if plane == "rollout":
        plant_in_group(monkeypatch, change("response_mask", off_by_one))
    else:
        plant_before_update(monkeypatch, change("response_mask", off_by_one))
    with pytest.raises(TrustError, match="response_mask .* token 0 of sample 0-0"):
        playground.run(*GRPO)


@pytest.mark.parametrize("dtype", one_fast_in(2, ["bfloat16", "float32"], others=BY_HAND))
def test_old_log_probs_that_are_shifted(playground, monkeypatch, dtype):
    plant_before_update(monkeypatch, change("old_log_probs", shifted))
    with pytest.raises(TrustError, match="ratio .* must be 1, "):
        playground.run(*GRPO, *SCORED, f"actor_rollout_ref.model.dtype={dtype}")


@pytest.mark.parametrize("dtype", one_fast_in(2, ["bfloat16", "float32"], others=BY_HAND))
@pytest.mark.parametrize("loss", ["vanilla", "decoupled"])
def test_rollout_log_probs_that_are_shifted(playground, monkeypatch, dtype, loss):
    plant_in_group(monkeypatch, change("rollout_log_probs", shifted))
    options = [
        f"actor_rollout_ref.model.dtype={dtype}",
        f"actor_rollout_ref.actor.policy_loss={loss}",
    ]
    scored = SCORED if loss == "vanilla" else []
    with pytest.raises(TrustError, match=SHIFTED):
        playground.run(*GRPO, *options, *scored)


@pytest.mark.parametrize("check_freq", [0, 1])
def test_rollout_log_probs_that_are_shifted_where_nothing_scores_a_step_before(
    playground, monkeypatch, check_freq
):
    plant_in_group(monkeypatch, change("rollout_log_probs", shifted))
    with pytest.raises(TrustError, match=SHIFTED):
        playground.run(*GRPO, f"trust.check_freq={check_freq}")


def test_a_gap_of_a_hundred_nats(playground, monkeypatch):
    plant_before_update(monkeypatch, change("old_log_probs", lambda values: values - 100))
    with pytest.raises(TrustError, match=r"\|log ratio\| is 100 "):
        playground.run(*GRPO, *SCORED, name="old")
    monkeypatch.undo()
    plant_in_group(monkeypatch, change("rollout_log_probs", lambda values: values - 100))

    with pytest.raises(TrustError, match=r"disagree by 100 |\(versions\): .* by 100 "):
        playground.run(*GRPO, *SCORED, name="rollout")


def test_group_ids_that_are_swapped(playground, monkeypatch):
    plant_before_update(
        monkeypatch, change("group_index", lambda groups: torch.arange(len(groups)) % 4)
    )

    with pytest.raises(TrustError, match="sample 0-1 .* group_index 1: "):
        playground.run(*GRPO)


def keep_prompts_for_ever(monkeypatch: Patch) -> None:
    """Prompts are found again whatever weights made their keys and values."""
    original = PromptCache.rows
    monkeypatch.setattr(PromptCache, "clear", lambda self: None)
    monkeypatch.setattr(
        PromptCache, "rows", lambda self, version, *rest: original(self, "any", *rest)
    )


def test_prompt_kv_kept_across_a_publish_on_shared_weights(playground, monkeypatch):
    keep_prompts_for_ever(monkeypatch)
    with pytest.raises(TrustError, match="disagree by .* same weights"):
        playground.run(*GRPO, "trainer.total_training_steps=6", "trust.check_freq=0", *FAST)

    with pytest.raises(TrustError, match=r"step \d found \((draws|versions)\)"):
        playground.run(
            *GRPO, "trainer.total_training_steps=6", "trust.check_freq=1", *FAST, name="checked"
        )


def test_prompt_kv_kept_across_a_publish_on_a_copy(playground, monkeypatch):
    keep_prompts_for_ever(monkeypatch)
    with pytest.raises(TrustError, match="canary: "):
        playground.run(*GRPO, "trainer.total_training_steps=6", *FAST, BFLOAT16)


def test_a_tensor_that_the_engine_skips(playground, monkeypatch):
    original = engine_weights.copy_weights

    def forgetful(module: nn.Module, weights: Any) -> dict[str, str]:
        name, kept = next(
            (n, p.detach().clone()) for n, p in module.named_parameters() if "layers.1.mlp.up" in n
        )
        hashes = original(module, weights)
        with torch.no_grad():
            dict(module.named_parameters())[name].copy_(kept)
        return hashes | stripe_hashes([(name, kept)])

    monkeypatch.setattr(engine_weights, "copy_weights", forgetful)
    with pytest.raises(
        TrustError, match=r"version 1 .* different tensors: model\.layers\.1\.mlp\.up_proj"
    ):
        playground.run(*GRPO, BFLOAT16)


def test_an_engine_that_takes_nothing_and_says_it_did(playground, monkeypatch):
    monkeypatch.setattr(
        engine_weights,
        "copy_weights",
        lambda module, weights: stripe_hashes((n, t.bfloat16()) for n, t in weights),
    )
    with pytest.raises(TrustError, match="version 1 .* different tensors: "):
        playground.run(*GRPO, "trainer.total_training_steps=6", *FAST, BFLOAT16)


def test_a_weight_that_is_not_sent(playground, monkeypatch):
    original = TorchTrainEngine.weights

    def without_one(self: TorchTrainEngine) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in original(self) if "lm_head" not in name)

    monkeypatch.setattr(TorchTrainEngine, "weights", without_one)
    with pytest.raises(TrustError, match="lm_head.weight: missing"):
        playground.run(*GRPO, BFLOAT16)


def test_a_loss_term_that_is_dead(playground, monkeypatch):
    plant_before_update(monkeypatch, change("advantages", torch.zeros_like))
    run = playground.run(*GRPO, "trainer.total_training_steps=6", "trust.check_freq=0")
    (found,) = [note for note in run.notes("finding") if "loss term" in note]
    assert found.startswith(
        "the loss term actor/loss_term/pg is on but was exactly 0 in the first 5 steps"
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_tensor_that_nothing_moves(playground, weight_decay):
    def deaf(spec: Spec) -> Spec:
        def build(get: Any, device: torch.device) -> object:
            engine = spec.factories["actor"](get, device)
            assert isinstance(engine, TorchTrainEngine)
            dict(engine.model.named_parameters())[
                "model.layers.1.mlp.up_proj.weight"
            ].register_hook(torch.zeros_like)
            return engine

        return replace(spec, factories={**spec.factories, "actor": build})

    options = [
        "trust.unmoved_after=3",
        f"actor_rollout_ref.actor.optim.weight_decay={weight_decay}",
    ]
    run = playground.run(*GRPO, "trainer.total_training_steps=6", *options, spoil=deaf)
    (found,) = run.notes("finding")
    assert found.startswith(
        "actor: 'model.layers.1.mlp.up_proj.weight' did not change in 3 updates"
    )


def test_a_ticket_that_is_lost(playground, monkeypatch):
    original = SampleQueue.release

    def losing(self: SampleQueue, step: int) -> Any:
        return original(self, step)[1:]

    monkeypatch.setattr(SampleQueue, "release", losing)
    with pytest.raises(CountsError, match="4 groups .* 3 "):
        playground.run(*GRPO)


def nan_advantages(uid: str, steps: range, monkeypatch: Patch) -> None:
    """The advantages of one sample are NaN in some steps."""
    count = iter(range(1000))

    def spoil(batch: Batch) -> None:
        if next(count) in steps:
            advantages = batch["advantages"]
            row = next(i for i, name in enumerate(batch["uid"]) if name.endswith(uid))
            advantages[row] = math.nan
            batch["advantages"] = advantages

    plant_before_update(monkeypatch, spoil)


def test_a_nan_loss_skips_the_step_and_leaves_a_bundle(playground, monkeypatch, capsys):
    nan_advantages("-2", range(1, 2), monkeypatch)
    run = playground.run(*GRPO, "trainer.save_freq=1", "trainer.keep_last=5")
    assert [step["actor/skipped"] for step in run.metrics()] == [0, 1, 0]
    same = (torch.equal(run.weights(1)[name], weight) for name, weight in run.weights(2).items())
    assert all(same), "the skipped step changed nothing"
    (bundle,) = (run.folder / "bundles").iterdir()
    assert any("skipped: loss or gradient is not finite" in note for note in run.notes("warning"))
    capsys.readouterr()
    assert cli.main(["replay", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "column advantages" in shown
    assert "sample 4-2 alone: loss nan" in shown and "4-1 alone" not in shown


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_nan_losses_in_a_row_end_the_run(playground, monkeypatch, preset):
    # The critic's updates stay sound: they must not hide that the actor has none.
    nan_advantages("-0", range(1, 1000), monkeypatch)
    options = [
        "trust.check_freq=0",
        "trust.max_skipped_updates=3",
        "trainer.total_training_steps=9",
        "trainer.save_freq=1",
    ]
    arguments = playground.overrides(
        "run", *options, *(["actor_rollout_ref.rollout.n=1"] if preset == "ppo" else [])
    )
    assert cli.main(["train", preset, *arguments]) == 1
    (error,) = notes(playground.folder / "run", "error")
    assert "3 updates of the actor in a row had a non-finite loss or gradient" in error
    assert "distflow replay" in error
    saved = sorted(path.name for path in (playground.folder / "run" / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-000003", "the fourth step ended the run before it was saved"


def test_weights_that_overflow_are_never_published_or_saved(playground, monkeypatch):
    original, count = TorchTrainEngine._step, iter(range(100))

    def overflowing(self: TorchTrainEngine, lrs: list[float]) -> None:
        original(self, [math.inf if next(count) == 1 else lr for lr in lrs])

    monkeypatch.setattr(TorchTrainEngine, "_step", overflowing)
    with pytest.raises(TrustError, match="step 2 weights of the actor .* finite"):
        playground.run(*GRPO, "trainer.save_freq=1")

    assert [path.name for path in (playground.folder / "run" / "checkpoints").glob("step-*")] == [
        "step-000001"
    ]
