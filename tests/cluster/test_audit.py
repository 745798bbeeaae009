"""Faults on two workers that train together, or of which one generates: an audit finds each."""

import textwrap

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.errors import TrustError
from distflow.observe.run_reader import read_events
from tests.e2e.runs import Playground, notes
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
        from distflow.algorithms import objectives
        objectives.kl_estimate = lambda log_probs, reference, kind: 0 * log_probs
        """,
        "loss",
    ),
    "no clip": (
        """
        from distflow.algorithms.losses import clipped_ratio as clipped
        original = clipped.clipped_surrogate
        clipped.clipped_surrogate = lambda ratio, advantages, *_: original(ratio, advantages, 1e3, 1e3, None)
        """,  # noqa: E501
        "loss",
    ),
    "a mean over each rank's own tokens": (
        """
        from distflow.algorithms import objectives
        original = objectives.token_weights
        def planted(mask, mode, counts, *more, **named):
            return original(mask, mode, {name: count / 2 for name, count in counts.items()}, *more, **named)
        objectives.token_weights = planted
        """,  # noqa: E501
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
    "mini-batches that each rank draws by itself": (
        """
        import torch
        from distflow.runtime import compiled_node
        original = compiled_node.minibatches
        def planted(number, groups, size, seed, *more):
            return original(number, groups, size, seed + torch.distributed.get_rank(), *more)
        compiled_node.minibatches = planted
        """,
        "mini-batches",
    ),
    "a group that is lost on its way to a rank": (
        """
        from distflow.cluster import remote_sample_queue as sample_queue
        original = sample_queue.to_batch
        sample_queue.to_batch = lambda groups: original(groups[:1])
        """,
        "groups",
    ),
    "whitened over each rank's own tokens": (
        """
        from distflow.algorithms import masked_reductions
        masked_reductions.global_sum = lambda value, reduce: value
        """,
        "advantages",
    ),
    "drawn from the likeliest tokens": (
        """
        from distflow.rollout.embedded import sampler
        original = sampler._draw_rows
        def planted(logits, law, *more):
            return original(logits, law._replace(top_p=0.8), *more)
        sampler._draw_rows = planted
        """,
        "draws",
    ),
    "responses that end a token early": (
        """
        from dataclasses import replace
        from distflow.rollout.embedded import engine
        original = engine.finish_reason
        def planted(tokens, params, tokenizer):
            return original(tokens, replace(params, max_tokens=params.max_tokens - 1), tokenizer)
        engine.finish_reason = planted
        """,
        "responses",
    ),
    "scores of the next sample": (
        """
        from distflow.rewards import router
        original = router.RewardRouter._ask
        async def planted(self, *arguments):
            results = await original(self, *arguments)
            return results[1:] + results[:1]
        router.RewardRouter._ask = planted
        """,
        "reward_results",
    ),
    "metrics of the first rank alone": (
        """
        from distflow.runtime import worker
        def planted(measured, ranks):
            return ranks.gather({name: value for metrics, _ in measured for name, value in metrics.items()})[0]
        worker.over_ranks = planted
        """,  # noqa: E501
        "metrics|advantages",
    ),
    "numbers that are rounded before they are summed": (
        """
        from distflow.cluster import process_groups
        original = process_groups.TorchCollective._numbers
        def planted(self, values):
            return original(self, values).bfloat16().double()
        process_groups.TorchCollective._numbers = planted
        """,
        "loss",
    ),
    "an entropy of twice the first rank's": (
        """
        from distflow.cluster import process_groups
        original = process_groups.TorchCollective.sum
        def planted(self, value):
            found = original(self, value)
            if isinstance(value, dict) and "token/entropy" in value:
                found["token/entropy"] = 2 * value["token/entropy"]
            return found
        process_groups.TorchCollective.sum = planted
        """,
        "loss",
    ),
}
APART = "trainer.allocation=embedded[rollout]:d1+torch[actor]:d1"
MORE = {
    "whitened over each rank's own tokens": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "drawn from the likeliest tokens": (APART,),
    "responses that end a token early": (APART,),
    "scores of the next sample": (APART,),
    "metrics of the first rank alone": ("algorithm.advantage_clip=0.5",),
}
"""One worker generates, the other trains: it knows what was generated by the row of a group's
number alone."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, on_ray: None) -> Playground:
    return Playground(tmp_path_factory.mktemp("audit"))


@pytest.mark.parametrize("name", one_fast_in(3, FAULTS, others=BY_HAND))
def test_a_fault_is_named_on_two_workers(
    ground: Playground, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    code, seen = FAULTS[name]
    module = ground.folder / f"fault_{list(FAULTS).index(name)}.py"
    # Only in the workers: the tests' own process stays as it is.
    module.write_text(
        "import ray\nif ray.get_runtime_context().get_actor_id():\n"
        + textwrap.indent(textwrap.dedent(code), "    ")
    )
    monkeypatch.syspath_prepend(str(ground.folder))
    with forgotten(module.stem):
        _, spec = ground.spec(
            *TWO_WORKERS, *MORE.get(name, ()), f"trainer.imports=[{module.stem}]", name=module.stem
        )
        with pytest.raises(TrustError, match=rf"the audit of (step|group) \d found \({seen}\)"):
            launch_ray(spec)


@pytest.mark.parametrize(
    ("name", "options", "proven"),
    [
        pytest.param(
            "torch",
            (),
            {"groups", "responses", "draws", "loss", "gradients"},
            marks=pytest.mark.by_hand,
        ),
        (
            "fsdp",
            (f"{ACTOR}.strategy=fsdp",),
            {"groups", "responses", "draws", "loss", "gradients"},
        ),
        ("whitened", ("algorithm.adv_estimator=reinforce_plus_plus",), {"advantages", "loss"}),
        ("apart", (APART,), {"groups", "responses", "draws", "loss", "gradients"}),
    ],
)
def test_without_a_fault_each_is_proven_over_both_workers(
    ground: Playground, name: str, options: tuple[str, ...], proven: set[str]
) -> None:
    _, spec = ground.spec(*TWO_WORKERS, *options, name=name)
    launch_ray(spec)
    audits = [event for event in read_events(ground.folder / name) if event.kind == "audit"]
    assert audits and all(proven <= set(audit.fields["proven"]) for audit in audits)
    assert not notes(ground.folder / name, "warning")
