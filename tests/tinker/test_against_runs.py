"""A loop of the Tinker API against `distflow train grpo` over an adapter: on the tokens and scores
that a run recorded, the client's losses, gradients and weights are the run's."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distflow.config import Config
from distflow.scheduling.data_plan import minibatches
from tests.e2e.reference_loop import Sample, read_step
from tests.e2e.runs import Playground, Run
from tests.tinker.server import Served, tinker_server

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

STEPS = 6
RANK = 4
ROUNDING = 1e-5
WEIGHTS = "adapter_model.safetensors"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
RECORDED = (
    f"{MODEL}.lora_rank={RANK}",
    # the scale of the API
    f"{MODEL}.lora_alpha=32",
    f"{ACTOR}.optim.lr=3e-3",
    f"{ACTOR}.optim.warmup_ratio=0.3",
    f"{ACTOR}.max_grad_norm=0.1",
    "trainer.save_groups=all",
    "trainer.save_freq=1",
    f"trainer.keep_last={STEPS}",
    f"trainer.total_training_steps={STEPS}",
)
TWO_PARTS = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2")


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    return Playground(tmp_path_factory.mktemp("against_runs"))


@pytest.fixture(scope="module")
def served(playground: Playground) -> Iterator[Served]:
    folder = playground.folder
    with tinker_server(folder, checkpoints=folder / "checkpoints") as found:
        yield found


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_ppo_of_the_api_is_grpo_without_kl(
    playground: Playground, served: Served, mode: str
) -> None:
    options = (f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.loss_agg_mode={mode}")
    run = playground.run("grpo", *RECORDED, *options, *TWO_PARTS, name=mode)
    assert max(step["actor/pg_clipfrac"] for step in run.metrics()) > 0
    assert_equal(run, served, by_ppo)


def test_a_custom_loss_is_grpo_with_kl(playground: Playground, served: Served) -> None:
    run = playground.run("grpo", *RECORDED, f"{ACTOR}.kl_loss_coef=0.5", name="kl")
    assert max(step["actor/kl_loss"] for step in run.metrics()) > 1e-4
    assert_equal(run, served, by_custom_loss)


@dataclass(frozen=True)
class Scored:
    """A recorded sample, with what GRPO makes of it before the step's first update."""

    sample: Sample
    advantage: float
    old: Tensor
    """Log-probs of the policy, `(ids - 1,)`."""
    ref: Tensor
    """Those of the base, `(ids - 1,)`."""

    @property
    def drawn(self) -> Tensor:
        """1 for tokens of the response, 0 for others, `(ids - 1,)`."""
        mask = torch.ones(len(self.sample.ids) - 1)
        mask[: self.sample.prompt_length - 1] = 0.0
        return mask


Pass = Callable[[Any, Config, list[Scored]], float]
"""One `forward_backward` over a mini-batch; returns the loss."""


def assert_equal(run: Run, served: Served, one_pass: Pass) -> None:
    """After each step: relative distance of the adapter's weights, gradient norms, losses."""
    actor = run.config.actor_rollout_ref.actor
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    model = client.create_lora_training_client(
        base_model=served.model, rank=RANK, seed=run.config.trainer.seed, train_unembed=False
    ).result()
    base = client.create_lora_training_client(base_model=served.model, rank=1).result()

    num_parts = math.ceil(run.config.data.train_batch_size / actor.ppo_mini_batch_size)
    num_updates = STEPS * num_parts * actor.ppo_epochs
    done = 0
    for number, recorded in enumerate(run.metrics()):
        samples = read_step(run.folder / "tokens" / f"{number + 1:06d}.safetensors")
        old = log_probs(model, samples)
        ref = log_probs(base, samples)
        scored = [
            Scored(*each) for each in zip(samples, advantages(samples), old, ref, strict=True)
        ]

        losses = []
        norms = []
        for epoch in range(actor.ppo_epochs):
            groups = [each.group for each in samples]
            size = actor.ppo_mini_batch_size
            seed = run.config.trainer.seed
            for part in minibatches(len(samples), groups, size, seed, number, epoch):
                losses.append(one_pass(model, run.config, [scored[index] for index in part]))
                params = adam(run.config, done, num_updates)
                stepped = model.optim_step(params).result()
                norms.append(stepped.metrics["grad_norm"])
                done += 1

        assert sum(losses) / len(losses) == pytest.approx(recorded["actor/loss"], abs=ROUNDING)
        assert sum(norms) / len(norms) == pytest.approx(recorded["actor/grad_norm"], rel=ROUNDING)
        path = model.save_weights_for_sampler(f"step-{number + 1}").result().path
        ours = adapter(run, number + 1)
        theirs = load_file(served.checkpoints / path.removeprefix("tinker://") / WEIGHTS)
        assert distance(ours, theirs) < ROUNDING, number

    client.close("success")
    start = adapter(run, 1)
    assert any(not torch.allclose(start[name], each, rtol=0.1) for name, each in ours.items())


def by_ppo(model: Any, config: Config, part: list[Scored]) -> float:
    """The loss of the API is a sum, so advantages carry the run's weights of tokens."""
    num_tokens = sum(float(each.drawn.sum()) for each in part)
    data = []
    for each in part:
        weight = 1 / num_tokens
        if config.actor_rollout_ref.actor.loss_agg_mode != "token-mean":
            weight = 1 / (len(part) * float(each.drawn.sum()))
        data.append(
            datum(
                each.sample,
                logprobs=each.old.tolist(),
                advantages=(each.drawn * each.advantage * weight).tolist(),
            )
        )

    found: float = model.forward_backward(data, "ppo").result().metrics["loss:sum"]
    return found


def by_custom_loss(model: Any, config: Config, part: list[Scored]) -> float:
    """With the run's estimate of the KL to the reference, which no named loss has."""
    actor = config.actor_rollout_ref.actor

    def loss(data: list[Any], passed: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        total = torch.zeros(())
        for each, new in zip(part, passed, strict=True):
            ratio = (new - each.old).exp()
            clipped = ratio.clamp(1 - actor.clip_ratio, 1 + actor.clip_ratio)
            gain = torch.minimum(ratio * each.advantage, clipped * each.advantage)
            behind = each.ref - new
            kl = behind.exp() - behind - 1
            total = total + ((actor.kl_loss_coef * kl - gain) * each.drawn).sum()

        mean = total / sum(each.drawn.sum() for each in part)
        return mean, {"loss": float(mean.detach())}

    data = [datum(each.sample) for each in part]
    found: float = model.forward_backward_custom(data, loss).result().metrics["loss"]
    return found


def datum(sample: Sample, **inputs: list[float]) -> Any:
    ids = sample.ids.tolist()
    targets: dict[str, Any] = {"target_tokens": ids[1:]}
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=targets | inputs
    )


def log_probs(model: Any, samples: list[Sample]) -> list[Tensor]:
    """Of every token but the first: `(ids - 1,)`."""
    passed = model.forward([datum(each) for each in samples], "cross_entropy").result()
    return [torch.tensor(each["logprobs"].data) for each in passed.loss_fn_outputs]


def advantages(samples: list[Sample]) -> list[float]:
    found = []
    for sample in samples:
        group = torch.tensor([each.score for each in samples if each.group == sample.group])
        centred = sample.score - group.double().mean()
        found.append(float(centred / (group.double().std() + 1e-6)))
    return found


def adam(config: Config, done: int, num_updates: int) -> Any:
    """The run's optimizer with its schedule, which a client keeps itself."""
    optim = config.actor_rollout_ref.actor.optim
    warmup = int(optim.warmup_ratio * num_updates)
    factor = done / max(warmup, 1)
    if done >= warmup:
        factor = 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / (num_updates - warmup))

    return tinker.types.AdamParams(
        learning_rate=optim.lr * factor,
        beta1=optim.betas[0],
        beta2=optim.betas[1],
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        grad_clip_norm=config.actor_rollout_ref.actor.max_grad_norm,
    )


def adapter(run: Run, step: int) -> dict[str, Tensor]:
    """By the names in PEFT's files."""
    weights = run.weights(step)
    return {name.replace(".default.", "."): weight for name, weight in weights.items()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """‖ours − theirs‖ / ‖theirs‖ over all weights."""
    assert ours.keys() == theirs.keys()
    off = sum(float((ours[name] - each).double().square().sum()) for name, each in theirs.items())
    size = sum(float(each.double().square().sum()) for each in theirs.values())
    return math.sqrt(off / size)
