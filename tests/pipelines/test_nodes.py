"""Standard nodes by themselves, where a whole run would hide what they do."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from distflow.algorithms.registry import find_adv_est
from distflow.config import Config, load_config
from distflow.config.keys.algorithm import AlgorithmConfig, KLControlConfig
from distflow.config.keys.reward import OnError
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Sample, Segment
from distflow.graph import Drop, NodeOutput
from distflow.pipelines.nodes import (
    dynamic_sampling,
    greedy_baseline,
    train_actor,
    train_critic,
)
from distflow.pipelines.nodes.advantages import apply_kl_penalty
from distflow.pipelines.nodes.reward_samples import reward_episodes, reward_samples
from distflow.pipelines.nodes.sample_responses import generate, load_responses
from distflow.pipelines.nodes.scored_tokens import score_policy, score_proximal
from distflow.pipelines.nodes.updates import update
from distflow.rewards.reward_results import Error, RewardResult, Score, Timeout
from distflow.rewards.router import RewardOutcome
from distflow.rollout.engine import GenerateRequest, SamplingParams
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import OneRank
from tests.runtime.groups import group as columns_of
from tests.tiny_models import tiny_tokenizer


class OneToken:
    """Answers each wanted sample with one token, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        self.requests.append(request)
        return tuple(
            Segment.drawn(sample, [7], [-0.5], [-0.25], [3], "stop") for sample in request.samples
        )


class RewardCallCounts:
    """A reward function that gives the same scores whoever asks, and records its arguments."""

    def __init__(self, *reward_results: RewardResult) -> None:
        self.reward_results = reward_results
        self.asked = list[Sequence[Sample]]()

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[RewardOutcome]:
        self.asked.append(samples)
        rights = [
            reward_result.value if isinstance(reward_result, Score) else 0.0
            for reward_result in self.reward_results
        ]

        return [
            RewardOutcome(v, {"custom": v}, right)
            for v, right in zip(self.reward_results, rights, strict=True)
        ]


def new_group_of_three() -> Group:
    row = PromptRow(5, (4, 5), "4=", ground_truth="4", domain="sums", response_ids=(7, 8))
    return Group(PromptGroup(5, 0, 5, 3, 0), row, SamplingParams(4), seed=1)


def answered() -> Group:
    group = new_group_of_three()
    engine = OneToken()
    group.samples = asyncio.run(generate(group, engine, tiny_tokenizer()))  # type: ignore[arg-type]
    return group


def context(group: Group, validating: bool = False) -> NodeContext:
    return NodeContext(
        load_config("grpo", complete=False).config,
        0,
        tiny_tokenizer(),
        group=group,
        validating=validating,
    )


def rewarded(*reward_results: RewardResult, min_valid: int = 2, validating: bool = False) -> object:
    group = answered()
    ctx = context(group, validating)
    return asyncio.run(
        reward_samples(group.samples, RewardCallCounts(*reward_results), ctx, min_valid=min_valid)
    )  # type: ignore[arg-type]


def run_baseline(reward_result: RewardResult) -> tuple[object, OneToken, RewardCallCounts, Group]:
    group = answered()
    engine = OneToken()
    reward_fn = RewardCallCounts(reward_result)
    made = asyncio.run(greedy_baseline(group, engine, reward_fn, tiny_tokenizer()))  # type: ignore[arg-type]
    return made, engine, reward_fn, group


def test_an_answer_is_a_sample_of_the_row_with_what_the_engine_says_of_it() -> None:
    group = answered()
    assert [sample.uid for sample in group.samples] == ["5-0", "5-1", "5-2"]
    batch = group.batch()
    assert batch["ground_truth"] == ["4"] * 3 and batch["domain"] == ["sums"] * 3
    assert (
        batch["prompt_ids"].tolist() == [[4, 5]] * 3 and batch["response_ids"].tolist() == [[7]] * 3
    )
    assert (
        batch["rollout_log_probs"].tolist() == [[-0.5]] * 3
        and batch["sampling_log_probs"].tolist() == [[-0.25]] * 3
    )
    assert batch["versions"].tolist() == [[3]] * 3
    assert batch["responses"] == [tiny_tokenizer().decode([7])] * 3


def test_the_answer_of_the_data_is_one_sample_made_by_the_policy() -> None:
    group = new_group_of_three()
    (sample,) = asyncio.run(load_responses(group, tiny_tokenizer()))
    group.samples = [sample]
    batch = group.batch()
    assert batch["response_ids"].tolist() == [[7, 8]] and batch["response_mask"].tolist() == [
        [1, 1]
    ]
    assert batch["responses"] == [tiny_tokenizer().decode([7, 8])]


def test_a_score_for_each_sample_and_none_is_made_up() -> None:
    written = rewarded(Score(1.0, {"why": "right"}), Error("crashed"), Score(0.5))
    assert isinstance(written, dict)
    assert written["scores"] == written["acc"] == [1.0, 0.0, 0.5] and written["valid"] == [
        True,
        False,
        True,
    ]
    assert written["reward_parts"] == [{"custom": 1.0}, {}, {"custom": 0.5}]
    assert written["reward_extra"] == [{"why": "right"}, {}, {}]
    assert written["reward_errors"][0] is None and "crashed" in written["reward_errors"][1]


def test_a_group_with_too_few_scores_to_compare_is_dropped_and_says_why() -> None:
    faults = (Score(1.0), Error("crashed"), Timeout(1.0))
    dropped = rewarded(*faults)
    assert (
        isinstance(dropped, Drop)
        and dropped.reason == "too_few_scores"
        and "crashed" in dropped.detail
    )
    assert not isinstance(rewarded(*faults, min_valid=1), Drop), (
        "an estimator that compares nothing takes it"
    )
    assert not isinstance(rewarded(*faults, validating=True), Drop), (
        "a validation counts it as wrong"
    )


def episodes(
    *results: RewardResult | None, on_error: OnError = "mask", min_valid: int = 2
) -> object:
    """Rewards of episodes with these results; None is a rejected one."""
    group = answered()
    (sample, *_) = group.samples
    outcomes = [None if result is None else RewardOutcome(result) for result in results]
    made = [replace(sample, outcome=outcome, rejected=outcome is None) for outcome in outcomes]
    return asyncio.run(
        reward_episodes(made, context(group), min_valid=min_valid, on_error=on_error)
    )


def test_rejected_and_failed_episodes_together_leave_too_few() -> None:
    one = Score(1.0)
    wrong = Error("crashed")
    dropped = episodes(None, wrong, wrong, one)
    assert (
        isinstance(dropped, Drop)
        and dropped.reason == "too_few_scores"
        and dropped.detail == "crashed"
    )

    for kept, valid in (
        (episodes(None, wrong, one, one), [False, False, True, True]),
        (episodes(None, wrong, wrong, one, on_error=0.25), [False, True, True, True]),
        (episodes(None, wrong, wrong, one, min_valid=0), [False, False, False, True]),
    ):
        assert isinstance(kept, dict) and kept["valid"] == valid


@pytest.mark.parametrize("score", [100.0, 0.1, -7.3])
def test_equal_scores_stay_equal_however_turns_split_them(score: float) -> None:
    """GRPO's advantage of a group with equal scores is exactly 0, also where rewards cancel each
    other."""
    splits: list[tuple[float, ...]] = [(33.3,), (10.1, 20.2), (), (66.7, -99.9, 0.3)]
    made = []
    for number, earned in enumerate(splits):
        turns = [
            Segment("policy", (5,), (0.0,), (0.0,), (0,), reward=reward)
            for reward in (*earned, 0.0)
        ]
        outcome = RewardOutcome(Score(score))
        made.append(
            Sample(
                f"0-{number}", 0, [Segment("prompt", (1,)), *turns], episode=number, outcome=outcome
            )
        )

    written = asyncio.run(reward_episodes(made, context(answered()), min_valid=2))
    assert isinstance(written, dict)
    batch = Batch.from_samples(made)
    batch["token_level_scores"] = written["token_level_scores"]
    rewards = batch["token_level_scores"]
    mask = batch["response_mask"]
    advantages, _ = find_adv_est("grpo").fn(rewards, mask, batch["group_index"])
    assert advantages.shape == (4, 4) and not advantages.any()

    for row, earned in zip(rewards.tolist(), splits, strict=True):
        wanted = [*earned, score - sum(earned)]
        assert row[: len(wanted)] == pytest.approx(wanted, abs=1e-4) and not any(row[len(wanted) :])


def rewarded_as(
    on_error: OnError, *reward_results: RewardResult, validating: bool = False, **domains: OnError
) -> object:
    group = answered()
    own = {name: (0, otherwise) for name, otherwise in domains.items()}
    work = reward_samples(
        group.samples,
        RewardCallCounts(*reward_results),  # type: ignore[arg-type]
        context(group, validating),
        min_valid=2,
        on_error=on_error,
        domains=own,
    )

    return asyncio.run(work)


def test_a_group_with_one_reward_error_is_dropped_where_the_config_says_so() -> None:
    faults = (Score(1.0), Error("crashed"), Score(0.0))
    dropped = rewarded_as("drop", *faults)
    assert (
        isinstance(dropped, Drop)
        and dropped.reason == "too_few_scores"
        and "crashed" in dropped.detail
    )
    assert isinstance(rewarded_as("mask", *faults, sums="drop"), Drop), "by its domain"
    assert not isinstance(rewarded_as("drop", *faults, sums="mask"), Drop)
    assert not isinstance(rewarded_as("drop", Score(1.0), Score(0.0), Score(1.0)), Drop)
    written = rewarded_as("drop", *faults, validating=True)
    assert isinstance(written, dict) and written["valid"] == [True, False, True], (
        "a validation drops nothing"
    )


def test_a_sample_with_a_reward_error_may_be_given_a_score_and_still_says_why() -> None:
    faults = (Score(1.0), Error("crashed"), Timeout(1.0))
    written = rewarded_as(-0.5, *faults)
    assert isinstance(written, dict)
    assert written["scores"] == [1.0, -0.5, -0.5] and written["valid"] == [True] * 3
    assert written["acc"] == [1.0, 0.0, 0.0] and [
        bool(error) for error in written["reward_errors"]
    ] == [0, 1, 1]
    in_validation = rewarded_as(-0.5, *faults, validating=True)
    assert isinstance(in_validation, dict) and in_validation["valid"] == [True, False, False]


def test_a_filter_by_accuracy_compares_no_response_with_a_reward_error() -> None:
    acc = torch.tensor([1.0, 1.0, 0.0])
    errors = [None, None, "crashed"]
    valid = torch.ones(3, dtype=torch.bool)
    scores = torch.tensor([1.0, 1.0, -0.5])
    dropped = dynamic_sampling(acc, scores, valid, None, errors, metric="acc")
    assert isinstance(dropped, Drop) and dropped.reason == "all_equal"
    assert dynamic_sampling(acc, scores, valid, None, errors, metric="score") is None, (
        "its score was given"
    )


def test_the_baseline_is_the_score_of_one_greedy_answer_for_all_samples() -> None:
    baselines, engine, reward_fn, group = run_baseline(Score(0.75))
    assert isinstance(baselines, torch.Tensor) and torch.equal(baselines, torch.full((3,), 0.75))
    (request,) = engine.requests
    assert request.params.greedy and request.samples == (0,)
    assert [len(samples) for samples in reward_fn.asked] == [1]
    assert len(group.samples) == 3 and not group.written, "the group itself is as it was"


def test_a_domain_whose_estimator_reads_no_baseline_is_not_answered_greedily() -> None:
    for wanted, answered_for in (
        ({None: False, "sums": True}, 1),
        ({None: True, "sums": False}, 0),
        ({None: False}, 0),
    ):
        group = answered()
        engine = OneToken()
        reward_fn = RewardCallCounts(Score(0.75))
        made = asyncio.run(
            greedy_baseline(group, engine, reward_fn, tiny_tokenizer(), wanted=wanted)
        )  # type: ignore[arg-type]
        assert isinstance(made, torch.Tensor) and made.tolist() == [0.75 * answered_for] * 3
        assert len(engine.requests) == len(reward_fn.asked) == answered_for


@pytest.mark.parametrize("fault", [Error("crashed"), Timeout(1.0)])
def test_a_reward_error_is_no_baseline(fault: RewardResult) -> None:
    dropped, *_ = run_baseline(fault)
    assert isinstance(dropped, Drop) and dropped.reason == "too_few_scores"


def test_a_text_has_no_special_tokens_and_its_tokens_keep_them() -> None:
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    assert isinstance(end, int)

    class Ends(OneToken):
        async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
            return tuple(
                Segment.drawn(s, [7, end], [0.0] * 2, [0.0] * 2, [3, 3], "stop") for s in (1, 0)
            )

    first, second = asyncio.run(generate(new_group_of_three(), Ends(), tokenizer))  # type: ignore[arg-type]
    assert (first.uid, second.uid) == ("5-1", "5-0"), (
        "an answer belongs to the sample that the engine names"
    )
    assert first.response == tokenizer.decode([7]) and first.response_segments[0].token_ids == (
        7,
        end,
    )


def test_a_group_of_one_is_never_dropped_for_too_few_scores() -> None:
    group = answered()
    work = reward_samples(
        group.samples[:1], RewardCallCounts(Error("crashed")), context(group), min_valid=2
    )  # type: ignore[arg-type]
    written = asyncio.run(work)
    assert isinstance(written, dict) and written["valid"] == [False]


ACC = [1.0, 0.0, 1.0]
PARTS = [{"math": 1.0, "form": 0.3}, {"math": 0.0, "form": 0.3}, {"math": 1.0, "form": 0.3}]


@pytest.mark.parametrize(
    ("scores", "valid", "metric", "reason"),
    [
        ([0.5, 0.5, 0.5], [True, True, True], "score", "all_equal"),
        # a reward error makes no difference
        ([0.5, 0.5, 0.9], [True, True, False], "score", "all_equal"),
        ([0.5, 0.7, 0.5], [True, True, True], "score", None),
        ([0.5, 0.7, 0.5], [True, True, True], "seq_reward", None),
        ([0.5, 0.5, 0.5], [True, True, True], "math", None),
        ([0.5, 0.7, 0.9], [True, True, True], "form", "all_equal"),
        ([0.5, 0.5, 0.5], [True, True, True], "acc", None),
        ([0.5, 0.7, 0.9], [True, False, True], "acc", "all_equal"),
        ([0.5, 0.7, 0.9], [True, True, True], "absent", "too_few_scores"),
        ([0.5, 0.7, 0.9], [False, False, True], "score", "too_few_scores"),
    ],
)
def test_a_group_whose_scored_samples_do_not_differ_is_dropped(
    scores: list[float], valid: list[bool], metric: str, reason: str | None
) -> None:
    drop = dynamic_sampling(
        torch.tensor(ACC), torch.tensor(scores), torch.tensor(valid), PARTS, metric=metric
    )
    assert (drop.reason if drop else None) == reason


class TokenScorer:
    """The entropy of a token is its id, its log-prob the negative of that."""

    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        out = batch.only(batch.names)
        out["log_probs"] = -batch.flat("response_ids").float()
        out["entropy"] = batch.flat("response_ids").float()
        return out


def test_the_mean_entropy_is_over_the_tokens_that_are_trained_on_and_counts_by_them() -> None:
    batch = columns_of(0, lengths=(3, 4), valid=(True, False))  # ids from 10 on
    for score in (score_policy, score_proximal):
        made = score(batch, TokenScorer())  # type: ignore[arg-type]
        assert made.metrics == {"actor/entropy": 11.0} and made.weight == 3.0

    assert isinstance(made.batch, dict)
    assert made.batch["old_log_probs"].tolist() == [-1.0] * 7, "the rollout engine's own"
    assert made.batch["prox_log_probs"].tolist() == [-10.0, -11, -12, -10, -11, -12, -13]


class TwoRanks(OneRank):
    """The other rank has the same."""

    size = 2

    def sum(self, value: Any) -> Any:
        return (
            {name: 2 * number for name, number in value.items()}
            if isinstance(value, dict)
            else 2 * value
        )


def test_the_coefficient_of_the_kl_moves_by_the_samples_of_all_ranks_and_is_told_as_it_was_used() -> (  # noqa: E501
    None
):
    mask = torch.ones(2, 3)
    state = dict[str, Any]()
    arguments = (
        torch.zeros(2, 3),
        torch.zeros(2, 3),
        torch.full((2, 3), -1.0),
        mask,
        torch.tensor([True, True]),
    )
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)
    penalise: Any = apply_kl_penalty(
        Config(algorithm=AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=control))
    )
    ctx = replace(context(answered()), state=state)

    coefficient = 0.5
    for _ in range(2):
        made = penalise(*arguments, ctx, TwoRanks())
        assert made.metrics["actor/kl_coef"] == pytest.approx(coefficient)
        assert made.batch["token_level_rewards"].tolist() == [[pytest.approx(-coefficient)] * 3] * 2
        coefficient *= 1 + 0.2 * 4 / 100

    assert state == {"value": pytest.approx(coefficient)}


class Trainer:
    """Counts its optimizer steps and skips every other."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def train_step(self, batch: Batch, objective: object) -> dict[str, float]:
        self.seen.append(sorted(set(batch["group_index"].tolist())))
        return {"loss": float(len(self.seen)), "skipped": float(len(self.seen) % 2)}


def trained(
    step: int, warmup: int = 2, engine: Trainer | None = None
) -> tuple[NodeOutput, Trainer, list[bool]]:
    engine = engine or Trainer()
    first = list[bool]()
    told = lambda engine, batch, metrics, is_first: first.append(is_first)  # noqa: E731
    ctx = NodeContext(Config(), step, None, after_update=told, group_ids=(0, 1, 2))  # type: ignore[arg-type]
    batch = Batch.concat([columns_of(number) for number in range(3)])
    objective: Any = None
    options: dict[str, Any] = {
        "name": "own",
        "objective": objective,
        "epochs": 2,
        "num_prompts": 2,
        "warmup": warmup,
    }

    return update(batch, engine, ctx, **options), engine, first  # type: ignore[arg-type]


def test_an_update_is_each_mini_batch_of_each_epoch_and_begins_behind_the_warm_up() -> None:
    made, engine, first = trained(step=2)
    assert [len(groups) for groups in engine.seen] == [2, 1, 2, 1]
    assert (
        sorted(engine.seen[0] + engine.seen[1])
        == sorted(engine.seen[2] + engine.seen[3])
        == [0, 1, 2]
    )
    assert first == [True, False, False, False]
    assert made.metrics == {"own/loss": 2.5, "own/skipped": 2.0} and made.batch is None
    made, engine, first = trained(step=1)
    assert engine.seen == [] and first == [] and made.metrics == {}


def test_a_mini_batch_without_tokens_is_counted_and_is_in_no_mean() -> None:
    class Half(Trainer):
        def train_step(self, batch: Batch, objective: object) -> dict[str, float]:
            empty = float(not super().train_step(batch, objective)["loss"] % 2)
            told = {"loss": 0.0 if empty else 6.0, "skipped": empty, "empty": empty}
            return told if empty else told | {"entropy": 1.0}

    made, _, first = trained(step=2, engine=Half())
    assert made.metrics == {
        "own/loss": 6.0,
        "own/entropy": 1.0,
        "own/skipped": 2.0,
        "own/empty": 2.0,
    }
    assert first == [True, False, False, False]


def test_the_critic_has_mini_batches_and_epochs_of_its_own_and_no_warm_up() -> None:
    actor = "actor_rollout_ref.actor"
    keys = [
        "trainer.critic_warmup=3",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_epochs=2",
        "critic.ppo_epochs=5",
    ]

    for more, num_prompts in (([], 4), (["critic.ppo_mini_batch_size=8"], 8)):
        config = load_config("ppo", [*keys, *more], complete=False).config
        options = [make(config).keywords for make in (train_actor, train_critic)]  # type: ignore[attr-defined]
        assert [(o["name"], o["epochs"], o["num_prompts"], o["warmup"]) for o in options] == [
            ("actor", 2, 4, 3),
            ("critic", 5, num_prompts, 0),
        ]
