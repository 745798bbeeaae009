"""Faults of losses and gradients on two workers that train together: the audit of a step finds each, on every rank."""

import textwrap

import pytest

from distflow.cluster.ray_entry import launch_ray
from distflow.errors import TrustError
from distflow.observe.reading.run_reader import read_events
from tests.e2e.runs import Playground
from tests.sparse_params import BY_HAND, one_fast_in
from tests.user_code import forgotten

pytestmark = pytest.mark.slow

ACTOR = "actor_rollout_ref.actor"
TWO_WORKERS = (
    "grpo",
    "trainer.total_training_steps=3",
    "trainer.launcher=ray",
    "trainer.n_gpus_per_node=2",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.5",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.clip_ratio=0.01",
    f"{ACTOR}.optim.lr=1e-2",
    f"{ACTOR}.optim.scheduler=constant",
)
FAULTS = {
    "no KL": (
        """
        from distflow.algorithms import objective
        objective.kl_estimate = lambda log_probs, reference, kind: 0 * log_probs
        """,
        "loss",
    ),
    "no clip": (
        """
        from distflow.algorithms.losses import clipped_ratio
        original = clipped_ratio.clipped_surrogate
        clipped_ratio.clipped_surrogate = lambda ratio, advantages, *clip: original(ratio, advantages, 1e3, 1e3, None)
        """,
        "loss",
    ),
    "a mean over each rank's own tokens": (
        """
        from distflow.algorithms import objective
        original = objective.token_weights
        def planted(mask, mode, counts, *more, **named):
            return original(mask, mode, {name: count / 2 for name, count in counts.items()}, *more, **named)
        objective.token_weights = planted
        """,
        "loss",
    ),
    "the mean of the ranks' gradients": (
        """
        from distflow.training import torch_engine
        original = torch_engine.sum_gradients
        def planted(parameters, group):
            trained = list(parameters)
            original(trained, group)
            for parameter in trained:
                parameter.grad /= group.size
        torch_engine.sum_gradients = planted
        """,
        "gradients",
    ),
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, on_ray: None) -> Playground:
    return Playground(tmp_path_factory.mktemp("audit"))


@pytest.mark.parametrize("name", one_fast_in(2, FAULTS, others=BY_HAND))
def test_a_fault_of_losses_and_gradients_is_named_on_two_workers(
    ground: Playground, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    code, seen = FAULTS[name]
    module = ground.folder / f"fault_{list(FAULTS).index(name)}.py"
    # Only in the workers: the tests' own process stays as it is.
    module.write_text(
        "import ray\nif ray.get_runtime_context().get_actor_id():\n" + textwrap.indent(textwrap.dedent(code), "    ")
    )
    monkeypatch.syspath_prepend(str(ground.folder))
    with forgotten(module.stem):
        _, spec = ground.spec(*TWO_WORKERS, f"trainer.imports=[{module.stem}]", name=module.stem)
        with pytest.raises(TrustError, match=rf"the audit of step \d found \({seen}\)"):
            launch_ray(spec)


@pytest.mark.parametrize(("strategy", "proven"), [("torch", {"loss", "gradients"}), ("fsdp", {"loss"})])
def test_without_a_fault_the_loss_is_proven_over_both_workers(
    ground: Playground, strategy: str, proven: set[str]
) -> None:
    _, spec = ground.spec(*TWO_WORKERS, f"{ACTOR}.strategy={strategy}", name=strategy)
    launch_ray(spec)
    audits = [event for event in read_events(ground.folder / strategy) if event.kind == "audit"]
    assert audits and all(proven <= set(audit.fields["proven"]) for audit in audits)
