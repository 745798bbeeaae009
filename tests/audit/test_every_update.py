"""What is checked of every update and every step, where no audit and no look is made any more: a
fault in single updates is found at the first that it strikes, and nothing is said where there is
none."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from distflow.algorithms import objectives
from distflow.algorithms.objectives import PolicyObjective
from distflow.audit.audit_schedule import AuditSchedule, Depth
from distflow.audit.audited_step.updates import _check_reach
from distflow.audit.check import Wrong
from distflow.audit.record_groups_and_updates import GradientWatch, UpdateRecord, striped, trained
from distflow.config.keys.optim import OptimConfig
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.pipelines.nodes import rollout_reward_filter
from distflow.rewards.router import RewardRouter
from distflow.rollout.embedded import engine as embedded
from distflow.rollout.embedded import sampler
from distflow.runtime import worker
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.validation import ValidationRunner
from distflow.runtime.weight_sync.sender import WeightSync
from distflow.runtime.worker import Worker
from distflow.scheduling.admission import Admission
from distflow.scheduling.domain_queue import DomainQueue
from distflow.training import torch_engine
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.e2e.planting import plant_behind, plant_from
from tests.e2e.runs import Playground

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
slow = pytest.mark.slow
BEGIN = 3  # behind the audits of a run's start
TWO = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=5")
NORM = ("algorithm.adv_norm.mean_level=batch", "algorithm.adv_norm.std_level=batch")


@pytest.fixture
def playground(tmp_path: Path, monkeypatch: Patch) -> Playground:
    monkeypatch.setattr(AuditSchedule, "looks_at", lambda self, step: Depth.BASE)
    return Playground(tmp_path, num_rows=64)


def found(
    playground: Playground, patch: Patch, plant: Plant, preset: str, *more: str, says: str
) -> None:
    steps = plant_from(patch, BEGIN, plant)
    with pytest.raises(TrustError, match=rf"step {BEGIN + 1} found \({says}"):
        playground.run(preset, *TWO, *more)
    assert steps[-1] == BEGIN


def never_cleared(patch: Patch) -> None:
    patch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


@slow
def test_gradients_that_are_kept_where_no_look_is_made(
    playground: Playground, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(AuditSchedule, "looks_at", lambda self, step: Depth.NONE)
    found(
        playground,
        monkeypatch,
        never_cleared,
        "grpo",
        says=r"gradients\): .* began with gradients left over",
    )


@slow
def test_accepted_groups_without_those_that_wait(
    playground: Playground, monkeypatch: Patch
) -> None:
    original = worker.group_metrics

    def only_consumed(counts: Any, *more: Any) -> dict[str, float]:
        return original(counts, *more) | {"async/accepted": float(counts.consumed)}

    monkeypatch.setattr(worker, "group_metrics", only_consumed)
    with pytest.raises(TrustError, match=r"\(metrics\): the metric async/enqueued is reported as"):
        playground.run("async_grpo", *TWO)


def never_clipped(patch: Patch) -> None:
    original = torch_engine.clip_gradients
    patch.setattr(torch_engine, "clip_gradients", lambda weights, most: original(weights, None))


def a_part_missing(patch: Patch) -> None:
    """As if one of the ranks had given no gradient."""
    original = torch_engine.sum_gradients

    def halved(weights: Any, group: Any) -> None:
        weights = list(weights)
        original(weights, group)
        for weight in weights:
            weight.grad *= 0.5

    patch.setattr(torch_engine, "sum_gradients", halved)


def twice_the_loss(patch: Patch) -> None:
    """The optimizer and the clipping see a gradient that is consistent in itself."""
    backward = torch.Tensor.backward
    patch.setattr(torch.Tensor, "backward", lambda self: backward(self * 2.0))


def a_micro_batch_left_out(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "backward", lambda self: None)


def scaled(factor: float, shift: float = 0.0, node_id: str = "calculate_advantages") -> Plant:
    def change(batch: Batch) -> None:
        batch["advantages"] = batch["advantages"] * factor + shift

    return plant_behind(node_id, change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        pytest.param(never_cleared, "gradients.: .* began with gradients left over", marks=slow),
        pytest.param(never_clipped, "gradients.: .* was given a gradient of norm", marks=slow),
        pytest.param(twice_the_loss, "gradients.: .* entered the gradient 2 times instead of once"),
        pytest.param(
            a_micro_batch_left_out,
            "gradients.: .* entered the gradient 0 times instead of once",
            marks=slow,
        ),
        pytest.param(
            a_part_missing, "gradients.: .*(of norm|is not the sum of the micro-batches')"
        ),
    ],
)
def test_gradients_of_updates_that_nothing_else_watches(
    playground: Playground, monkeypatch: Patch, plant: Plant, says: str
) -> None:
    found(
        playground,
        monkeypatch,
        plant,
        "grpo",
        "actor_rollout_ref.actor.max_grad_norm=0.1",
        says=says,
    )


def advantages_reversed(batch: Batch) -> None:
    """The samples of each group have one another's advantages."""
    order = torch.arange(len(batch))
    for group in batch["group_index"].unique():
        rows = (batch["group_index"] == group).nonzero()[:, 0]
        order[rows] = rows.flip(0)
    batch["advantages"] = batch["advantages"][order]


def scores_reversed(patch: Patch) -> None:
    """The samples of each group have one another's scores."""
    original = RewardRouter.__call__

    async def planted(self: RewardRouter, samples: Any) -> Any:
        return (await original(self, samples))[::-1]

    patch.setattr(RewardRouter, "__call__", planted)


@pytest.mark.parametrize("name", ["advantages", pytest.param("scores", marks=slow)])
def test_scores_or_advantages_of_other_samples_where_nothing_else_is_checked(
    playground: Playground, monkeypatch: Patch, name: str
) -> None:
    monkeypatch.setattr(AuditSchedule, "looks_at", lambda self, step: Depth.NONE)
    begin = BEGIN - (name == "scores")  # when the scores of the next step are given
    plant = (
        scores_reversed
        if name == "scores"
        else plant_behind("calculate_advantages", advantages_reversed)
    )
    steps = plant_from(monkeypatch, begin, plant)
    says = (
        rf"step {BEGIN + 1} found \(advantages\): sample .* by its reward functions and the "
        r"advantage"
    )
    with pytest.raises(TrustError, match=says):
        playground.run("grpo", *TWO)
    assert steps[-1] == BEGIN


def narrow_clip(share: float, reach: float) -> Plant:
    """The critic's clip is narrower on a few tokens."""

    def plant(patch: Patch) -> None:
        original = objectives.compute_value_loss

        def planted(values: Any, old: Any, returns: Any, mask: Any, **options: Any) -> Any:
            odd = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)) < share
            loss, stats = original(values, old, returns, mask, **options)
            narrow, _ = original(values, old, returns, mask, **options | {"cliprange_value": reach})
            return torch.where(odd, narrow, loss), stats

        patch.setattr(objectives, "compute_value_loss", planted)

    return plant


@slow
def test_a_clip_of_values_that_is_narrower_on_a_few_tokens(
    playground: Playground, monkeypatch: Patch
) -> None:
    more = ("critic.ppo_epochs=4", "critic.optim.lr=1e-2", "actor_rollout_ref.rollout.n=4")
    plant = narrow_clip(0.05, 0.1)
    found(
        playground,
        monkeypatch,
        plant,
        "ppo",
        *more,
        says="loss.: the gradient of the critic's loss .* another clip",
    )


def stands_still(patch: Patch) -> None:
    """A weight that is not among the few whose gradient a short check sums."""
    original = TorchTrainEngine._step

    def planted(self: TorchTrainEngine, lrs: list[float]) -> None:
        watched = dict(striped(trained(self.model), BEGIN))
        name, weight = next(
            each for each in self.model.named_parameters() if each[0] not in watched
        )
        before = weight.detach().clone()
        original(self, lrs)
        weight.detach().copy_(before)

    patch.setattr(TorchTrainEngine, "_step", planted)


def test_a_weight_that_stands_still(playground: Playground, monkeypatch: Patch) -> None:
    found(
        playground,
        monkeypatch,
        stands_still,
        "grpo",
        says="optimizer.: model.* did not move at the learning rate",
    )


def norms_stand_still(patch: Patch) -> None:
    original, taken = TorchTrainEngine._step, list[int]()

    def planted(self: TorchTrainEngine, lrs: list[float]) -> None:
        kept = [(p, p.detach().clone()) for p in self._trainable.values() if p.dim() == 1]
        original(self, lrs)
        taken.append(1)
        with torch.no_grad():
            for weight, before in kept if len(taken) == 1 else ():
                weight.copy_(before)

    patch.setattr(TorchTrainEngine, "_step", planted)


@slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_weights_that_an_update_leaves_out(
    playground: Playground, monkeypatch: Patch, is_planted: bool
) -> None:
    rate = (
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.scheduler=constant",
    )
    if not is_planted:
        playground.run("grpo", *TWO, *rate)
        return
    found(
        playground,
        monkeypatch,
        norms_stand_still,
        "grpo",
        *rate,
        says=r"optimizer.: model\..*norm.* did not move",
    )


def moments_halved(engine: TorchTrainEngine) -> None:
    for entries in engine.optimizer.state.values():
        entries["exp_avg_sq"].mul_(0.5)


def weights_scaled(engine: TorchTrainEngine) -> None:
    for parameter in engine.model.parameters():
        parameter.data.mul_(1.001)


@pytest.mark.parametrize(
    ("change", "says"), [(moments_halved, "exp_avg_sq of "), (weights_scaled, "model.")]
)
@slow
def test_a_model_that_changes_between_two_updates(
    playground: Playground,
    monkeypatch: Patch,
    change: Callable[[TorchTrainEngine], None],
    says: str,
) -> None:
    original = Worker._after_step

    def planted(self: Worker, released: Any, *more: Any) -> None:
        original(self, released, *more)
        if released.version.step == BEGIN:
            change(self.resources.actor)  # type: ignore[arg-type]  # it is torch's

    monkeypatch.setattr(Worker, "_after_step", planted)
    (said,) = [
        each
        for each in playground.run("grpo", *TWO).notes("warning")
        if "between two optimizer steps" in each
    ]
    assert said.startswith(says)


@slow
def test_a_sync_and_a_validation_that_are_left_out(
    playground: Playground, monkeypatch: Patch
) -> None:
    send = WeightSync.send

    def planted(self: WeightSync, version: Any) -> Any:
        return (False, {}) if version.step == BEGIN else send(self, version)

    with monkeypatch.context() as patch:
        patch.setattr(WeightSync, "send", planted)
        with pytest.raises(
            TrustError,
            match=f"step {BEGIN + 1} begins with version {BEGIN - 1} sent, but {BEGIN} is",
        ):
            playground.run("grpo", *TWO, "async.max_staleness=2", name="unsent")
    validating = (
        f"data.val_files={playground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        "trainer.test_freq=2",
    )
    monkeypatch.setattr(ValidationRunner, "validate", lambda self, step: {})
    with pytest.raises(
        TrustError,
        match="the validation after step 2 is due by trainer.test_freq, but was not made",
    ):
        playground.run("grpo", *TWO, *validating, name="not-validated")


VALIDATING = ("data.allow_overlap=true", "trainer.test_freq=1")


def test_greedy_responses_that_are_sampled(playground: Playground, monkeypatch: Patch) -> None:
    draw = sampler.draw_by_law

    def planted(policy: Any, logits: Any, law: Any, *more: Any) -> Any:
        return draw(policy, logits, law._replace(greedy=False), *more)

    plant_from(monkeypatch, BEGIN, lambda patch: patch.setattr(sampler, "draw_by_law", planted))
    with pytest.raises(
        TrustError, match=rf"validation after step {BEGIN + 1} found .* than the most likely one"
    ):
        playground.run("grpo", *TWO, *VALIDATING, f"data.val_files={playground.folder}/rows.jsonl")


@slow
def test_greedy_responses(playground: Playground) -> None:
    validating = (*VALIDATING, f"data.val_files={playground.folder}/rows.jsonl")
    for name, more in (("plain", ()), ("ahead", ("async.max_staleness=2",))):
        assert playground.run("grpo", *TWO, *validating, *more, name=name).notes("error") == []


@slow
@pytest.mark.parametrize(
    ("preset", "more", "plant"),
    [
        ("ppo", (), scaled(1.3)),
        ("ppo", (), scaled(0.5)),
        ("ppo", (), scaled(1.0, 0.1)),
        ("grpo", ("algorithm.adv_estimator=reinforce_plus_plus_baseline",), scaled(1.3)),
        ("grpo", NORM, scaled(1.0, 0.1, "advantage_norm")),
    ],
)
def test_advantages_that_are_not_whitened_over_the_step(
    playground: Playground, monkeypatch: Patch, preset: str, more: tuple[str, ...], plant: Plant
) -> None:
    found(
        playground,
        monkeypatch,
        plant,
        preset,
        *more,
        says="advantages.: .*over the step, but have the mean",
    )


@slow
@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("grpo", ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",)),
        ("grpo", NORM),
        # most mini-batches are empty
        ("grpo", ("algorithm.mask_truncated=true", "data.max_response_length=2")),
        ("ppo", ("actor_rollout_ref.rollout.n=4",)),
    ],
)
def test_the_same_runs_without_a_fault(
    playground: Playground, preset: str, more: tuple[str, ...]
) -> None:
    run = playground.run(preset, *TWO, *more)
    assert run.notes("error") == []
    assert all("no token in the loss" in warning for warning in run.notes("warning"))


@slow
def test_groups_that_a_filter_drops_though_their_scores_differ(
    playground: Playground, monkeypatch: Patch
) -> None:
    original = rollout_reward_filter.drop_reason

    def drops_close_ones(values: torch.Tensor, *more: Any) -> str | None:
        return "all_equal" if float(values.max() - values.min()) < 0.6 else original(values, *more)

    plant_from(
        monkeypatch,
        BEGIN,
        lambda patch: patch.setattr(rollout_reward_filter, "drop_reason", drops_close_ones),
    )
    with pytest.raises(
        TrustError,
        match=r"found \(dropped\): group \d+ was dropped for one score on all its samples",
    ):
        playground.run(
            "grpo",
            *TWO,
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=score",
        )


@slow
def test_groups_that_a_filter_keeps_though_their_scores_are_equal(
    playground: Playground, monkeypatch: Patch
) -> None:
    playground.write_reward(
        "def compute_score(solution_str):\n    return float(len(set(solution_str)) % 2)\n"
    )

    def keeps_all(patch: Patch) -> None:
        patch.setattr(rollout_reward_filter, "drop_reason", lambda *more: None)

    plant_from(monkeypatch, BEGIN, keeps_all)
    filters = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2")
    with pytest.raises(
        TrustError,
        match=rf"step {BEGIN + 2} found \(groups\): group \d+ was kept, but all its samples",
    ):
        playground.run("grpo", *TWO, *filters)


@slow
@pytest.mark.parametrize("ends", [True, False])
def test_responses_that_continue_after_a_stop_string(
    playground: Playground, monkeypatch: Patch, ends: bool
) -> None:
    original = embedded.finish_reason

    def misses_strings(ids: list[int], params: Any, tokenizer: Any) -> Any:
        return original(ids, params if ends else replace(params, stop=()), tokenizer)

    plant_from(
        monkeypatch, BEGIN, lambda patch: patch.setattr(embedded, "finish_reason", misses_strings)
    )
    says = (
        rf"step {BEGIN + 2} found \(responses\): sample \S+ continues after a string of "
        r"rollout.stop"
    )
    with nullcontext() if ends else pytest.raises(TrustError, match=says):
        playground.run(
            "grpo", *TWO, "actor_rollout_ref.rollout.stop=[a, b, c, d, e, f, g, h, 'i', j, k]"
        )


@slow
def test_a_throughput_of_other_tokens(playground: Playground, monkeypatch: Patch) -> None:
    original = worker.Figures.joined

    def with_prompts_twice(ranks: Any) -> worker.Figures:
        figures = original(ranks)
        return replace(figures, num_tokens=figures.num_tokens + int(figures.prompt_lengths.sum()))

    monkeypatch.setattr(worker.Figures, "joined", staticmethod(with_prompts_twice))
    with pytest.raises(
        TrustError, match=r"step 2 found \(metrics\): throughput/tokens_per_s of the step before"
    ):
        playground.run("grpo", *TWO)


@slow
@pytest.mark.parametrize("keeps_worst", [True, False])
def test_the_checkpoint_that_is_kept_as_the_best(
    playground: Playground, monkeypatch: Patch, keeps_worst: bool
) -> None:
    frequencies = (
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "trainer.keep_last=1",
        "trainer.keep_best=true",
    )
    rows = (
        f"data.val_files={playground.folder}/rows.jsonl",
        "data.val_max_samples=4",
        "data.allow_overlap=true",
    )
    options = (
        *TWO,
        *frequencies,
        *rows,
        "reward.functions={default: [length, {name: custom, weight: 0}]}",
    )
    if not keeps_worst:
        playground.run("grpo", *options)
        return
    monkeypatch.setattr(worker, "score", lambda name, metrics: -metrics[name])
    with pytest.raises(
        TrustError, match=r"found \(validation\): the checkpoint of step \d is compared by -1 for"
    ):
        playground.run("grpo", *options)


@slow
def test_complete_groups_that_are_passed_over(playground: Playground, monkeypatch: Patch) -> None:
    first = DomainQueue.first

    def the_last_of_eight(self: DomainQueue, step: int, wanted: int) -> list[int] | None:
        complete = sorted(number for members in self._due.values() for number in members.complete)
        if step > 1:
            return first(self, step, wanted)
        return complete[-wanted:] if len(complete) >= 2 * wanted else None

    monkeypatch.setattr(DomainQueue, "first", the_last_of_eight)
    # A busy machine has more groups complete by then: which is the last depends on its load.
    says = r"step 1 found \(groups\): the step has group \d+ \(issued at version 0\), though"
    with pytest.raises(TrustError, match=says):
        playground.run("async_grpo", *TWO, "async.max_staleness=2")


@slow
def test_a_kl_that_is_reported_and_left_out_of_the_loss(
    playground: Playground, monkeypatch: Patch
) -> None:
    def without_kl(patch: Patch) -> None:
        call = PolicyObjective.__call__

        def planted(self: PolicyObjective, *arguments: Any) -> Any:
            whole, (loss, sums) = self.kl_loss_coef, call(self, *arguments)
            self.kl_loss_coef = 0.0
            loss, other = call(self, *arguments)
            self.kl_loss_coef = whole
            return loss, {**sums, "loss": other["loss"]}

        patch.setattr(PolicyObjective, "__call__", planted)

    found(
        playground,
        monkeypatch,
        without_kl,
        "grpo",
        says=r"gradients\): the loss of a mini-batch of the actor is",
    )


@slow
def test_scores_with_a_bonus_that_no_function_gives(
    playground: Playground, monkeypatch: Patch
) -> None:
    def with_bonus(patch: Patch) -> None:
        scored = rollout_reward_filter._scored

        def planted(*arguments: Any) -> Any:
            columns = scored(*arguments)
            return columns | {"scores": [score + 0.1 for score in columns["scores"]]}

        patch.setattr(rollout_reward_filter, "_scored", planted)

    plant_from(monkeypatch, BEGIN, with_bonus)
    with pytest.raises(
        TrustError, match=rf"step {BEGIN + 2} found \(rewards\): sample \S+ has the score"
    ):
        playground.run("grpo", *TWO)


@slow
def test_parts_of_responses_that_are_trained_on(playground: Playground, monkeypatch: Patch) -> None:
    def cut(patch: Patch) -> None:
        make = Group.sample

        def planted(group: Group, index: int, segment: Any, *rest: Any) -> Any:
            columns = ("token_ids", "rollout_log_probs", "sampling_log_probs", "versions")
            short = {name: getattr(segment, name)[:-1] for name in columns}
            return make(group, index, replace(segment, **short), *rest)

        patch.setattr(Group, "sample", planted)

    plant_from(monkeypatch, BEGIN, cut)
    with pytest.raises(
        TrustError,
        match=rf"step {BEGIN + 2} found \(responses\): sample \S+ is trained on with the",
    ):
        playground.run("grpo", *TWO)


def test_a_step_that_another_watches_behind_a_skipped_one_is_no_change_from_outside() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    engine: Any = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    watch, loss = GradientWatch(engine), SimpleNamespace(outputs=())

    def update(turn: int, moves: bool) -> UpdateRecord:
        record = UpdateRecord("actor", engine, cast(Any, loss), cast(Any, None))
        watch.begin(record, turn)
        if moves:
            model(torch.ones(2)).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        record.metrics = {"skipped": float(not moves)}
        watch.end(record)
        return record

    update(1, moves=False)
    with torch.no_grad():
        model.weight.add_(1.0)  # the first step that is taken, which another watch has seen
    assert not update(2, moves=True).changed
    with torch.no_grad():
        model.weight.add_(1.0)
    assert update(3, moves=True).changed == ["weight"]


FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if sum(map(ord, solution_str)) % 3 == 0:
        raise ValueError("no")
    return sum(map(ord, solution_str)) % 7 / 6
"""


@slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_errors_of_a_validation_that_count_as_scores(
    playground: Playground, monkeypatch: Patch, is_planted: bool
) -> None:
    scored = rollout_reward_filter._scored

    def planted(outcomes: Any, validating: bool, *more: Any) -> Any:
        return scored(outcomes, validating and not is_planted, *more)

    monkeypatch.setattr(rollout_reward_filter, "_scored", planted)
    playground.write_reward(FAILING)
    keys = (
        *VALIDATING,
        f"data.val_files={playground.folder}/rows.jsonl",
        "reward.on_error={score: 0}",
    )
    says = r"\(validation\): val/errors is reported as 0, but \d+ by the recorded scores"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        playground.run("grpo", *TWO, *keys, "reward.max_error_rate=0.9")


@slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_more_groups_at_once_than_the_config_allows(
    playground: Playground, monkeypatch: Patch, is_planted: bool
) -> None:
    begin = Admission.__init__

    def planted(self: Admission, *arguments: Any) -> None:
        begin(self, *arguments)
        self._max_concurrent = 99 if is_planted else self._max_concurrent

    monkeypatch.setattr(Admission, "__init__", planted)
    keys = ("async.max_staleness=2", "async.max_concurrent_rollouts=1")
    with (
        pytest.raises(TrustError, match=r"\d+ groups ran at once, but")
        if is_planted
        else nullcontext()
    ):
        playground.run("grpo", *TWO, *keys)


@slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_pairs_that_are_validated_by_another_tokens_score(
    tmp_path: Path, monkeypatch: Patch, is_planted: bool
) -> None:
    forward = TorchScorer.forward

    def planted(self: TorchScorer, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        scored = forward(self, batch, outputs)
        scored["text_scores"] = scored.flat("text_scores").roll(int(is_planted))
        return scored

    monkeypatch.setattr(TorchScorer, "forward", planted)
    playground = Playground(tmp_path)
    playground.write_rows(
        [{"prompt": f"a{i}", "chosen": f"yes{i}", "rejected": f"no{i}"} for i in range(16)]
    )
    none = (
        "~reward.functions",
        "~custom_reward_function.path",
        "~reward.num_workers",
        "~actor_rollout_ref.rollout.n",
    )
    keys = (
        "data.max_prompt_length=32",
        "data.max_response_length=32",
        "trainer.total_training_steps=2",
        *VALIDATING,
    )
    says = r"\(validation\): the chosen text of row \d+ of 'val' has the score"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        playground.run("rm", *none, *keys, f"data.val_files={tmp_path}/rows.jsonl")


def one_weight_drawn_anew(patch: Patch) -> None:
    original = TorchTrainEngine._step

    def planted(self: TorchTrainEngine, lrs: list[float]) -> None:
        original(self, lrs)
        [*self._trainable.values()][-2].data.normal_()

    patch.setattr(TorchTrainEngine, "_step", planted)


@slow
def test_a_weight_that_something_else_writes_in_an_update(
    playground: Playground, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(AuditSchedule, "looks_at", lambda self, step: Depth.NONE)
    says = r"optimizer\): .*lora_A.* moved by .* something else wrote to it"
    found(
        playground,
        monkeypatch,
        one_weight_drawn_anew,
        "grpo",
        "actor_rollout_ref.model.lora_rank=2",
        says=says,
    )


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.0, False), (1.2, True)])
def test_how_far_adamw_can_move_a_weight(factor: float, is_wrong: bool) -> None:
    settings = OptimConfig(lr=1e-2, weight_decay=0.0)
    weight, (first, second) = torch.nn.Parameter(torch.zeros(1)), settings.betas
    optimizer = torch.optim.AdamW([weight], lr=settings.lr, betas=settings.betas, weight_decay=0.0)
    for step in range(-4800, 200):  # gradients that move it the farthest in the last step
        weight.grad = torch.full((1,), (second / first) ** max(step - 200, -400))
        before = weight.detach().double().clone()
        optimizer.step()
    after = before + factor * (weight.detach() - before)
    assert float((before - after) / factor) > 7.2 * settings.lr
    model = torch.nn.ParameterDict({"w": weight})
    update: Any = SimpleNamespace(
        few=[before, after], engine=SimpleNamespace(model=model, optimizer=optimizer), role="actor"
    )
    with pytest.raises(Wrong, match="w of the actor moved by") if is_wrong else nullcontext():
        _check_reach(update, settings, settings.lr)
