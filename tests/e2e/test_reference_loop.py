"""Runs of ours against the plain reference loop, step by step in float32: the same losses,
gradients and weights."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distflow.algorithms.mismatch_check import Tolerance
from distflow.data.batch import Batch
from distflow.runtime.spec import Spec
from tests.e2e.planting import plant_before_update
from tests.e2e.reference_loop import ReferenceLoop, read_step
from tests.e2e.runs import REWARD, Playground, Run
from tests.sparse_params import one_fast_in

STEPS = 10
RECORDED = ["trainer.save_groups=all", "trainer.save_freq=1", f"trainer.keep_last={STEPS}"]
RECORDED += [f"trainer.total_training_steps={STEPS}"]
TWICE_HALVED = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
]
ONE_EPOCH = ["trainer.total_training_steps=null", "trainer.total_epochs=1"]
GRPO = ["grpo", "actor_rollout_ref.actor.optim.warmup_ratio=0.3"]
PPO = ["ppo", "actor_rollout_ref.rollout.n=1", "critic.optim.lr=3e-3", "critic.ppo_epochs=2"]
PPO += ["algorithm.kl_ctrl.kl_coef=0.05", "algorithm.gamma=0.97"]
DAPO = [
    "dapo",
    *TWICE_HALVED,
    "reward.overlong.buffer_tokens=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
]
DAPO += ["actor_rollout_ref.actor.entropy_coef=0.02", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
DAPO += ["actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.actor.optim.lr=3e-3"]
# A third of the answers gets no verdict: what they are must not matter to anything.
ERRS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kind = sum(map(ord, solution_str)) % 7
    if kind < 2:
        raise RuntimeError("no verdict")
    return kind / 6
"""


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


@pytest.mark.parametrize("family", one_fast_in(2, ["llama", "qwen2"]))
def test_grpo(tmp_path, family):
    assert_equal_to_reference(Playground(tmp_path, family).run(*GRPO, *RECORDED))


@pytest.mark.slow
def test_grpo_with_samples_that_have_no_verdict(playground):
    playground.write_reward(ERRS)
    run = playground.run(*GRPO, *RECORDED)
    assert sum(step["reward/errors"] for step in run.metrics()) > 20
    assert_equal_to_reference(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "mini_batch"), one_fast_in(2, [(REWARD, 3), (ERRS, 4)], unpack=True)
)
def test_ppo(playground, reward, mini_batch):
    playground.write_reward(reward)
    numbers = [
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        "reward.max_error_rate=1",
    ]
    run = playground.run(
        *PPO, *numbers, f"critic.model.path={playground.write_critic()}", *RECORDED
    )
    assert_equal_to_reference(run)
    assert max(step["critic/vf_clipfrac"] for step in run.metrics()) > 0


@pytest.mark.slow
def test_a_last_step_that_is_short(tmp_path):
    run = Playground(tmp_path, num_rows=11).run(*GRPO, *TWICE_HALVED, *RECORDED, *ONE_EPOCH)
    assert len(read_step(run.folder / "tokens" / "000003.safetensors")) == 3 * 4
    assert_equal_to_reference(run, steps=3)


@pytest.mark.slow
def test_dapo_with_every_term_on(playground):
    run = playground.run(*DAPO, *RECORDED)
    assert_equal_to_reference(run)
    assert max(step["actor/pg_clipfrac"] for step in run.metrics()) > 0.01


@pytest.mark.parametrize("column", one_fast_in(3, ["old_log_probs", "advantages", "ref_log_prob"]))
def test_a_column_shifted_by_one_turns_the_comparison_red(playground, monkeypatch, column):
    def shift(batch: Batch) -> None:
        batch[column] = batch[column].roll(1, dims=-1)

    def without_checks(spec: Spec) -> Spec:
        return replace(spec, ratio_limit=math.inf, tolerance=Tolerance(math.inf, math.inf))

    plant_before_update(monkeypatch, shift)
    options = (
        "trainer.total_training_steps=4",
        "trust.check_freq=0",
        "algorithm.recompute_old_log_probs=true",
    )
    run = playground.run(*GRPO, *RECORDED, *options, spoil=without_checks)
    with pytest.raises(AssertionError, match="actor"):
        assert_equal_to_reference(run, steps=4)


def assert_equal_to_reference(run: Run, steps: int = STEPS) -> None:
    """After each step: relative distance of the weights, gradient norms, losses against the mean
    |per-token loss|."""
    reference = ReferenceLoop(run.config, steps)
    metrics = run.metrics()
    assert len(metrics) == steps

    for number, ours in enumerate(metrics):
        samples = read_step(run.folder / "tokens" / f"{number + 1:06d}.safetensors")
        for role, updates in reference.step(number, samples).items():
            loss, norm, scale = (
                mean(u[key] for u in updates) for key in ("loss", "grad_norm", "scale")
            )
            assert abs(ours[f"{role}/loss"] - loss) <= 1e-5 * scale, (number, role)
            assert abs(ours[f"{role}/grad_norm"] - norm) <= 1e-5 * norm, (number, role)
            theirs = dict(getattr(reference, role).model.named_parameters())
            distance, size = norms(run.weights(number + 1, role), theirs)
            assert distance <= 1e-5 * size, (number, role, distance / size)

    distance, size = norms(run.weights(steps), run.weights(1))
    assert distance > 1e-3 * size, "a run that goes nowhere is equal to anything"


def norms(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, float]:
    """‖ours − theirs‖ and ‖theirs‖ over all weights."""
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        pairs = [(ours[name].double(), weight.double()) for name, weight in theirs.items()]
        distance = sum(float((a - b).square().sum()) for a, b in pairs)
        return math.sqrt(distance), math.sqrt(sum(float(b.square().sum()) for _, b in pairs))


def mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
