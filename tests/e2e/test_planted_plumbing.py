"""Silent faults in plumbing, planted one at a time into real runs: the checks of a step name each.

Faults in formulas, which no run can notice, are in `tests/references`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from distflow.algorithms import objectives
from distflow.checks import rewards
from distflow.checks.checker import Checker
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.launch import engines, train_engines
from distflow.rewards import router
from distflow.rewards.function_calls import call_arguments
from distflow.rewards.function_loading import FAILS
from distflow.rewards.pool.pool import RewardPool
from distflow.rewards.reward_results import Score
from distflow.rollout import engine_weights
from distflow.rollout.embedded import engine as embedded_engine
from distflow.rollout.embedded import host_lane
from distflow.rollout.embedded import scheduler as sequences
from distflow.runtime import node_context
from distflow.runtime.compiled_node import Step
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.e2e.planting import plant_before_update, plant_behind
from tests.e2e.runs import Playground
from tests.sparse_params import first_of_each

Patch = pytest.MonkeyPatch
GRPO = ("grpo",)
TWO = (
    "grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
)
KL = (
    "grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.5",
)
SMALL_MICROS = ("grpo", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40")
SCORED = ("grpo", "algorithm.recompute_old_log_probs=true")
FAST = ("actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.scheduler=constant")


@dataclass(frozen=True)
class Fault:
    """plant: the change. config: preset and overrides. seen: what the message says."""

    plant: Callable[[Patch], None]
    seen: str
    config: tuple[str, ...] = GRPO


def column(name: str, rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        batch[name] = rule(batch[name])

    return change


def before_update(change: Callable[[Batch], None]) -> Callable[[Patch], None]:
    return lambda patch: plant_before_update(patch, change)


def attribute(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Replace `owner.name` by `wrap` of it."""
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def off_by_one(mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (1, 0))[:, :-1] * mask


def without_end(mask: torch.Tensor) -> torch.Tensor:
    return mask * torch.nn.functional.pad(mask, (0, 1))[:, 1:]


def first_turned(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([-values[:1], values[1:]])


def per_micro_batch(original: Any) -> Any:
    return lambda mask, mode, counts, *more, **named: original(
        mask, mode, objectives.loss_counts(mask), *more, **named
    )


def policy_term(rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    def wrap(original: Any) -> Any:
        def planted(self: Any, current: torch.Tensor, fields: Any) -> Any:
            loss, stats = original(self, current, fields)
            return rule(loss), stats

        return planted

    return attribute(objectives.PolicyObjective, "_per_token", wrap)


def never_in_the_first_four(original: Any) -> Any:
    return lambda ids, params, *more: original(
        ids, replace(params, stop=()) if len(ids) < 5 else params, *more
    )


def norms_apart(original: Any, *arguments: Any, **options: Any) -> Any:
    optimizer = original(*arguments, **options)
    (group,) = optimizer.param_groups
    norms = [p for p in group["params"] if p.dim() == 1]
    group["params"] = [p for p in group["params"] if p.dim() > 1]
    optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    return optimizer


def hotter_reference(patch: Patch) -> None:
    step = Step.__call__
    forward = TorchScorer.forward
    scoring: list[str] = []

    def called(self: Step, batch: Batch, ctx: Any) -> Any:
        scoring[:] = [self.node.node_id]
        return step(self, batch, ctx)

    def hotter(self: TorchScorer, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        if scoring == ["reference_log_prob"]:
            self.temperature = 1.3
        return forward(self, batch, outputs)

    patch.setattr(Step, "__call__", called)
    patch.setattr(TorchScorer, "forward", hotter)


def follow(config: Config, get: Any, device: Any) -> TorchScorer:
    options = train_engines.reference_options(config)
    return TorchScorer(get("policy"), group=get("collective"), **options)


def next_sample(original: Any) -> Any:
    async def planted(self: Any, samples: Any) -> Any:
        found = await original(self, samples)
        return found[1:] + found[:1]

    return planted


def in_order_of_arrival(original: Any) -> Any:
    waiting: list[Any] = []

    async def planted(*call: Any) -> Any:
        waiting.append(await original(*call))
        return waiting.pop(0) if len(waiting) > 2 else waiting[0]

    return planted


def neighbours_text(original: Any) -> Any:
    async def planted(self: Any, samples: Any) -> Any:
        turned = [*samples[1:], samples[0]]
        return await original(
            self, [replace(s, response=t.response) for s, t in zip(samples, turned, strict=True)]
        )

    return planted


def neighbours_accuracy(original: Any) -> Any:
    async def planted(self: Any, samples: Any) -> Any:
        found = await original(self, samples)
        turned = [*found[1:], found[0]]
        return [
            replace(own, accuracy=next_one.accuracy)
            for own, next_one in zip(found, turned, strict=True)
        ]

    return planted


def changed_scores(change: Callable[[str, Any, Score], float]) -> Callable[[Any], Any]:
    """change: of the scores of the user's function and the checks' probe, by the name and the
    call's arguments."""

    def wrap(original: Any) -> Any:
        async def planted(self: Any, name: str, asked: Any, *more: Any) -> Any:
            found = await original(self, name, asked, *more)
            if name not in ("custom", FAILS):
                return found

            return [
                replace(own, value=change(name, call, own)) if isinstance(own, Score) else own
                for call, own in zip(asked, found, strict=True)
            ]

        return planted

    return wrap


def cached_by_length() -> Callable[[Any], Any]:
    known: dict[tuple[str, int], float] = {}
    return changed_scores(
        lambda name, call, own: known.setdefault((name, len(call["solution_str"])), own.value)
    )


def unsent_on_odd_steps(original: Any) -> Any:
    def planted(self: Any, version: Any, at_start: bool = False) -> Any:
        return {} if version.step % 2 else original(self, version, at_start)

    return planted


def unread_on_odd_steps(patch: Patch) -> None:
    original = engine_weights.copy_weights

    def planted(module: Any, weights: Any) -> Any:
        from distflow.rollout.engine_weights import stripe_hashes

        planted.calls += 1  # type: ignore[attr-defined]
        if planted.calls % 2:  # type: ignore[attr-defined]
            return original(module, weights)
        return stripe_hashes(weights)

    planted.calls = 0  # type: ignore[attr-defined]
    patch.setattr(engine_weights, "copy_weights", planted)


def no_learning_rate(original: Any) -> Any:
    return lambda self, lrs: original(self, [0.0 for _ in lrs])


def silent_no_learning_rate(patch: Patch) -> None:
    original = TorchTrainEngine.train_step

    def planted(self: Any, batch: Batch, loss_fn: Any) -> Any:
        self.schedule = lambda step: 0.0
        return original(self, batch, loss_fn)

    patch.setattr(TorchTrainEngine, "train_step", planted)


def uncleared(patch: Patch) -> None:
    original = TorchTrainEngine.__init__

    def planted(self: Any, model: Any, **options: Any) -> None:
        original(self, model, **options)
        self.optimizer.zero_grad = lambda set_to_none=True: None

    patch.setattr(TorchTrainEngine, "__init__", planted)


def last_dropped(original: Any) -> Any:
    return lambda *arguments: original(*arguments)[:-1]


def one_twice(original: Any) -> Any:
    def planted(*arguments: Any) -> Any:
        found = original(*arguments)
        return [found[0]] * len(found)

    return planted


def finished_always(patch: Patch) -> None:
    from distflow.data.sample import Sample

    patch.setattr(Sample, "truncated", property(lambda self: False))


def one_stream(original: Any) -> Any:
    return lambda stream, sample: original(stream, 0)


def one_prompt_stream(original: Any) -> Any:
    return lambda stream, sample: original(replace(stream, row=0), sample)


def old_log_probs_anew(patch: Patch) -> None:
    original = node_context.NodeContext.minibatches

    def planted(self: Any, batch: Batch, num_prompts: int, epoch: int) -> Iterator[Batch]:
        for mini_batch in original(self, batch, num_prompts, epoch):
            mini_batch["old_log_probs"] = (
                ACTOR[0].forward(mini_batch, ("log_probs",)).flat("log_probs")
            )
            yield mini_batch

    init = TorchTrainEngine.__init__

    def kept(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        ACTOR[:] = [self]

    patch.setattr(TorchTrainEngine, "__init__", kept)
    patch.setattr(node_context.NodeContext, "minibatches", planted)


ACTOR: list[Any] = []


def critic_by_a_copy(patch: Patch) -> None:
    import copy

    copies: dict[int, Any] = {}
    original = TorchScorer.forward

    def planted(self: TorchScorer, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        if outputs != ("values",):
            return original(self, batch, outputs)

        frozen = copies.setdefault(id(self), copy.deepcopy(self.model))
        model = self.model
        self.model = frozen

        try:
            return original(self, batch, outputs)
        finally:
            self.model = model

    patch.setattr(TorchScorer, "forward", planted)


def estimator(rule: Callable[[Batch], None]) -> Callable[[Patch], None]:
    return plant_behind("calculate_advantages", rule)


def one_group(batch: Batch) -> None:
    scores = batch["token_level_rewards"].sum(-1)
    advantages = ((scores - scores.mean()) / (scores.std() + 1e-6))[:, None] * batch[
        "response_mask"
    ]
    batch["advantages"] = advantages


def moments_lost(patch: Patch) -> None:
    original = TorchTrainEngine.train_step

    def planted(self: Any, batch: Batch, loss_fn: Any) -> Any:
        self.optimizer.state.clear()
        return original(self, batch, loss_fn)

    patch.setattr(TorchTrainEngine, "train_step", planted)


def twice_backward(patch: Patch) -> None:
    from distflow.training import torch_engine

    original = torch_engine.sum_gradients

    def planted(parameters: Any, group: Any) -> None:
        trained = list(parameters)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        original(trained, group)

    patch.setattr(torch_engine, "sum_gradients", planted)


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().to(tensor)


def rounded_gradients(patch: Patch) -> None:
    from distflow.training import torch_engine

    original = torch_engine.sum_gradients

    def planted(parameters: Any, group: Any) -> None:
        trained = list(parameters)
        original(trained, group)
        for parameter in trained:
            parameter.grad.copy_(rounded(parameter.grad))

    patch.setattr(torch_engine, "sum_gradients", planted)


def rounded_moments(patch: Patch) -> None:
    original = TorchTrainEngine._step

    def planted(self: Any, lrs: Any) -> None:
        original(self, lrs)
        for state in self.optimizer.state.values():
            state["exp_avg"].copy_(rounded(state["exp_avg"]))

    patch.setattr(TorchTrainEngine, "_step", planted)


def unclipped(patch: Patch) -> None:
    from distflow.training import torch_engine as gradients

    patch.setattr(gradients, "clip_grads_with_norm_", lambda *arguments: None)


def greedy_rollout(patch: Patch) -> None:
    original = host_lane.sample

    def planted(logits: torch.Tensor, rows: Any) -> Any:
        return original(logits * 50, rows)._replace(
            rollout_log_probs=(logits.double().log_softmax(-1)).gather(
                -1, original(logits * 50, rows).token_ids[:, None]
            )[:, 0]
        )

    patch.setattr(host_lane, "sample", planted)


def other_rows(patch: Patch) -> None:
    from distflow.scheduling import data_plan

    patch.setattr(data_plan, "place", lambda number, num_rows, *order: (number // num_rows, 0))


FAULTS = {
    "a loss mask off by one": Fault(before_update(column("loss_mask", off_by_one)), "mini-batches"),
    "the end token out of the loss": Fault(
        before_update(column("loss_mask", without_end)), "mini-batches"
    ),
    "a mean per micro-batch": Fault(
        attribute(objectives, "token_weights", per_micro_batch), "loss", SMALL_MICROS
    ),
    "a loss mask off by one, early": Fault(
        plant_behind("actor_old_log_prob", column("loss_mask", off_by_one)), "masks", SCORED
    ),
    "the end token left out, early": Fault(
        plant_behind("actor_old_log_prob", column("loss_mask", without_end)), "masks", SCORED
    ),
    "a sign turned for one sample": Fault(policy_term(first_turned), "loss"),
    "advantages of one sample turned": Fault(
        estimator(column("advantages", first_turned)), "advantages"
    ),
    "groups rolled": Fault(
        estimator(column("advantages", lambda a: a.roll(4, dims=0))), "advantages"
    ),
    "samples rolled": Fault(
        estimator(column("advantages", lambda a: a.roll(1, dims=0))), "advantages"
    ),
    "one group for the batch": Fault(estimator(one_group), "advantages"),
    "a second normalisation": Fault(
        estimator(column("advantages", lambda a: a / (a.std() + 1e-6))), "advantages"
    ),
    "returns of another": Fault(
        plant_behind("calculate_advantages", column("returns", lambda r: r * 2)),
        "advantages",
        ("ppo",),
    ),
    "the reference shifted": Fault(
        plant_behind("reference_log_prob", column("ref_log_prob", lambda v: v.roll(1, dims=1))),
        "log_probs",
        KL,
    ),
    "the reference at another temperature": Fault(hotter_reference, "log_probs", KL),
    "the reference follows the policy": Fault(
        lambda patch: patch.setattr(engines, "build_reference", follow),
        "reference",
        (*KL, *FAST),
    ),
    "rewards to the next sample": Fault(
        attribute(router.RewardRouter, "__call__", next_sample), "reward_results|advantages"
    ),
    "rewards in order of arrival": Fault(
        attribute(RewardPool, "call", in_order_of_arrival),
        "reward_results",
        ("grpo", "trust.check_rewards=false"),
    ),
    "a neighbour's text": Fault(
        attribute(router.RewardRouter, "__call__", neighbours_text), "reward_results|advantages"
    ),
    "a neighbour's accuracy": Fault(
        attribute(router.RewardRouter, "__call__", neighbours_accuracy),
        "has the accuracy",
        ("dapo",),
    ),
    "weights not sent on odd steps": Fault(
        attribute(WeightSender, "sync", unsent_on_odd_steps), "did not reach it"
    ),
    "weights not taken on odd steps": Fault(
        unread_on_odd_steps,
        "version 1 .* different tensors: ",
        ("grpo", "actor_rollout_ref.model.dtype=bfloat16", *FAST),
    ),
    "a learning rate of 0 behind the metric": Fault(
        attribute(TorchTrainEngine, "_step", no_learning_rate), "optimizer", ("grpo", *FAST)
    ),
    "a learning rate that stays 0": Fault(silent_no_learning_rate, "optimizer", ("grpo", *FAST)),
    "gradients not cleared": Fault(uncleared, "gradients", TWO),
    "the last mini-batch dropped": Fault(
        attribute(node_context, "minibatches", last_dropped), "mini-batches", TWO
    ),
    "a mini-batch taken twice": Fault(
        attribute(node_context, "minibatches", one_twice), "mini-batches", TWO
    ),
    "truncated counts as finished": Fault(finished_always, "responses"),
    "one seed for the samples of a group": Fault(
        attribute(sequences, "sample_key", one_stream), "draws"
    ),
    "one seed for all prompts": Fault(
        attribute(sequences, "sample_key", one_prompt_stream), "draws"
    ),
    "old log-probs anew for each mini-batch": Fault(
        old_log_probs_anew, "mini-batches", (*TWO, *FAST)
    ),
    "a critic scored by a copy": Fault(
        critic_by_a_copy,
        "log_probs",
        ("ppo", "critic.optim.lr=1e-2", "critic.optim.scheduler=constant"),
    ),
    "moments lost": Fault(moments_lost, "optimizer", TWO),
    "gradients doubled": Fault(twice_backward, "gradients"),
    "gradients not clipped": Fault(
        unclipped, "gradients", ("grpo", "actor_rollout_ref.actor.max_grad_norm=0.001")
    ),
    "gradients in bfloat16": Fault(rounded_gradients, "gradients"),
    "moments in bfloat16": Fault(rounded_moments, "optimizer"),
    "greedier than it says": Fault(greedy_rollout, "draws"),
    "one row for all groups": Fault(other_rows, "groups"),
    "truncated samples in the loss": Fault(
        plant_behind(
            "sample_mask", lambda batch: batch.__setitem__("loss_mask", batch["response_mask"])
        ),
        "masks",
        ("grpo", "algorithm.mask_truncated=true"),
    ),
    "a stop string that some samples run over": Fault(
        attribute(embedded_engine, "finish_reason", never_in_the_first_four),
        "responses",
        ("grpo", "actor_rollout_ref.rollout.stop=[a,e,K,Q,z]"),
    ),
    "scores that are rounded": Fault(
        attribute(
            RewardPool, "_score_group", changed_scores(lambda name, call, own: round(own.value, 2))
        ),
        "reward_results",
    ),
    "scores of another response of that length": Fault(
        attribute(RewardPool, "_score_group", cached_by_length()),
        "reward_results",
    ),
    "texts stripped before they are scored": Fault(
        lambda patch: [
            patch.setattr(
                module,
                "call_arguments",
                lambda domain, text, *rest: call_arguments(domain, text.strip(), *rest),
            )
            for module in (router, rewards)
        ],
        "reward_results",
    ),
    "no weight decay on norms": Fault(
        attribute(train_engines, "make_optimizer", lambda original: partial(norms_apart, original)),
        "optimizer",
        ("grpo", "actor_rollout_ref.actor.optim.lr=1e-6"),
    ),
    "a score on the first token": Fault(
        plant_behind(
            "actor_old_log_prob", column("token_level_scores", lambda s: s.roll(1, dims=1))
        ),
        "rewards",
        ("ppo",),
    ),
}


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    return Playground(tmp_path_factory.mktemp("run"))


def told_by(seen: str, step: str) -> str:
    """What the error says: the step and the check that found it, or words of no check."""
    if " " in seen:
        return seen

    return rf"step {step} found \(({seen})\)"


CASES = first_of_each(FAULTS, lambda name: FAULTS[name].seen)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_named(playground: Playground, monkeypatch: Patch, name: str) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    with pytest.raises(TrustError, match=told_by(fault.seen, "[1-3]")):
        preset, *overrides = fault.config
        name = f"fault-{list(FAULTS).index(name)}"
        playground.run(preset, *overrides, "trainer.total_training_steps=3", name=name)


LATE = (
    "a second normalisation",
    "samples rolled",
    "the reference shifted",
    "the reference at another temperature",
    "rewards to the next sample",
    "a neighbour's text",
    "weights not sent on odd steps",
    "a learning rate of 0 behind the metric",
    "the last mini-batch dropped",
    "moments lost",
    "gradients doubled",
    "gradients in bfloat16",
    "moments in bfloat16",
    "gradients not clipped",
    "a score on the first token",
)
"""Faults that begin after the start."""
LATE_CASES = first_of_each(LATE, lambda name: FAULTS[name].seen)


@pytest.mark.parametrize("name", LATE_CASES)
def test_a_fault_that_begins_late_and_is_rare(
    playground: Playground, monkeypatch: Patch, name: str
) -> None:
    """In one of three steps from the sixth on."""
    fault = FAULTS[name]
    step_taken = Checker.step_taken
    steps: list[int] = []

    def planted(self: Checker, step: int, *arguments: Any) -> None:
        steps.append(step)
        late.undo()
        if step >= 5 and (step - 5) % 3 == 0:
            fault.plant(late)
        step_taken(self, step, *arguments)

    with pytest.MonkeyPatch.context() as late:
        monkeypatch.setattr(Checker, "step_taken", planted)
        preset, *overrides = fault.config

        with pytest.raises(TrustError, match=told_by(fault.seen, "([6-9]|1[0-4])")):
            playground.run(
                preset,
                *overrides,
                "trainer.total_training_steps=14",
                "trust.check_freq=1000",
                name=f"late-{LATE.index(name)}",
            )

    assert 5 <= steps[-1] <= 8, "in the first or second step with the fault"


@pytest.mark.slow
def test_a_group_of_another_row_is_found(playground: Playground, monkeypatch: Patch) -> None:
    from distflow.scheduling import data_plan

    original = data_plan.place
    monkeypatch.setattr(
        data_plan, "place", lambda number, *more: original(number + (number == 13), *more)
    )

    with pytest.raises(TrustError, match=r"step 4 found \(groups\): group 1[34] "):
        playground.run("grpo", "trainer.total_training_steps=4", name="another-row")
