"""Rewards by domain: weights, parts by name, the overlong penalty, and parts that fail."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.checks.group_records import GroupRecords
from distflow.config.keys.reward import RewardPart
from distflow.data.sample import Sample, Segment
from distflow.environments.workflows import Workflow
from distflow.errors import UserError
from distflow.pipelines.nodes.reward_samples import reward_episodes
from distflow.pipelines.nodes.workflow_rollout import run_scored_episodes
from distflow.rewards.reward_results import Error, Score, Timeout
from distflow.rewards.router import Overlong, RewardOutcome, RewardRouter, check_domains
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from tests.patience import at_some_deadline
from tests.pipelines.test_nodes import OneToken, context, new_group_of_three
from tests.rewards.routers import make_router
from tests.runtime.groups import bound
from tests.tiny_models import tiny_tokenizer

FAULTY = str(Path(__file__).parent / "pool" / "faulty_verifiers.py")
SETTINGS = {"timeout_s": 20.0, "num_workers": 1, "max_response_length": 100}


def sample(
    response: str, ground_truth="5", domain: str = "default", num_tokens: int = 1, **extra
) -> Sample:
    segments = [Segment("prompt", (1,)), Segment("environment", (1,) * num_tokens)]
    return Sample(
        "0-0",
        0,
        segments,
        response=response,
        ground_truth=ground_truth,
        domain=domain,
        extra_info=extra,
    )


def score(router: RewardRouter, judged: Sample) -> RewardOutcome:
    return asyncio.run(router([judged]))[0]


@pytest.fixture(scope="module")
def router():
    functions = {
        "default": [("math", 1.0), ("format", 0.25)],
        "text": [("exact_match", 2.0)],
        "faulty": [("custom", 1.0), ("exact_match", 1.0)],
    }
    own = {"response_limits": {"short": 20}, "custom": (FAULTY, "compute_score")}
    with make_router(functions, overlong=Overlong(10, 0.5), **own, **SETTINGS) as router:
        yield router


@pytest.mark.parametrize(
    ("response", "total", "parts"),
    [
        (r"\boxed{5}", 1.25, {"math": 1.0, "format": 1.0}),
        (r"\boxed{6}", 0.25, {"math": 0.0, "format": 1.0}),
        ("5", 1.0, {"math": 1.0, "format": 0.0}),
        ("6", 0.0, {"math": 0.0, "format": 0.0}),
    ],
)
def test_the_score_is_the_weighted_sum_of_the_parts(router, response, total, parts):
    judgement = score(router, sample(response))
    assert judgement.reward_result == Score(total)
    assert judgement.scores() == {**parts, "overlong": 0.0}


def test_a_domain_has_its_own_functions_and_others_the_default_ones(router):
    assert score(router, sample("a", "a", "text")).reward_result == Score(2.0)
    assert set(score(router, sample("5", "5", "elsewhere")).parts) == {"math", "format", "overlong"}


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(90, 0.0), (91, -0.05), (95, -0.25), (100, -0.5), (200, -0.5)]
)
def test_the_overlong_penalty_grows_over_the_buffer_and_stops_at_the_factor(
    router, num_tokens, penalty
):
    judgement = score(router, sample("a", "a", "text", num_tokens))
    assert judgement.parts["overlong"] == Score(pytest.approx(penalty))
    assert judgement.reward_result == Score(pytest.approx(2.0 + penalty))


def test_the_penalty_lies_before_a_domains_own_limit(router):
    judgements = [
        score(router, sample("5", "5", "short", num_tokens)) for num_tokens in (10, 15, 20)
    ]
    assert [judgement.parts["overlong"].value for judgement in judgements] == pytest.approx(
        [0.0, -0.25, -0.5]
    )


def test_one_part_that_fails_leaves_the_sample_without_a_score_and_keeps_the_others(router):
    router.call_counts.take()
    judgement = score(router, sample("raises", "raises", "faulty"))
    assert isinstance(judgement.reward_result, Error) and judgement.reward_result.reason.startswith(
        "custom: KeyError"
    )
    assert judgement.scores() == {"exact_match": 1.0, "overlong": 0.0}
    assert isinstance(score(router, sample("nan", "x", "faulty")).reward_result, Error)
    counts = router.call_counts.take().counts
    assert (
        counts["reward/errors"] == counts["reward/errors/custom"] == 2
        and "reward/timeouts" not in counts
    )
    assert router.call_counts.take().counts == {}


def test_a_part_that_hangs_is_a_timeout_of_the_sample():
    def check(deadline_s: float) -> None:
        settings = {**SETTINGS, "timeout_s": deadline_s}
        with make_router(
            {"default": [("custom", 1.0)]}, custom=(FAULTY, "compute_score"), **settings
        ) as router:
            assert score(router, sample("hang in c")).reward_result == Timeout(deadline_s)
            assert score(router, sample("echo", value=3)).reward_result == Score(3.0)
            counts = router.call_counts.take().counts
            assert (
                counts["reward/timeouts"],
                counts["reward/timeouts/custom"],
                counts["reward/calls"],
            ) == (1, 1, 2)

    at_some_deadline(check, 0.4, 10.0)


def test_remarks_of_a_part_are_kept_under_its_name(router):
    reward_result = score(router, sample("dict", "x", "faulty")).reward_result
    assert (
        isinstance(reward_result, Score)
        and reward_result.value == 0.5
        and reward_result.extra["custom/why"] == "half"
    )


def test_samples_are_judged_at_once_and_in_their_order(router):
    judged = [
        sample("a", "a", "text"),
        sample("b", "a", "text"),
        sample("a", "a", "text", num_tokens=200),
    ]
    assert [j.reward_result for j in asyncio.run(router(judged))] == [
        Score(2.0),
        Score(0.0),
        Score(1.5),
    ]


def test_domains_are_checked_before_the_run():
    functions = {"gsm8k": [RewardPart("math")]}
    check_domains(functions, ["gsm8k", "gsm8k"])
    check_domains({**functions, "default": [RewardPart("math")]}, ["gsm8x"])
    with pytest.raises(UserError, match=r"'gsm8x'.*reward.functions.*'gsm8k'"):
        check_domains(functions, ["gsm8k", "gsm8x"])


@pytest.mark.parametrize(
    ("functions", "custom", "said"),
    [
        ({}, None, "is empty"),
        ({"default": []}, None, "is empty"),
        ({"default": [("maths", 1.0)]}, None, "did you mean 'math'"),
        ({"default": [("custom", 1.0)]}, None, "set custom_reward_function.path"),
        (
            {"default": [("custom", 1.0)]},
            (FAULTY, "compute_scores"),
            "has no 'compute_scores'; did you mean 'compute_score'?",
        ),
    ],
)
def test_functions_that_are_not_there(functions, custom, said):
    with pytest.raises(UserError) as raised:
        make_router(functions, custom=custom, **SETTINGS)
    assert said in str(raised.value)


def test_a_function_may_be_named_by_its_module():
    with make_router(
        {"default": [("distflow.rewards.text_rewards:exact_match", 1.0)]}, **SETTINGS
    ) as router:
        assert score(router, sample("a", "a")).reward_result == Score(1.0)


def test_what_failed_is_counted_by_domain_and_what_the_other_parts_said_is_kept(router):
    router.call_counts.take()
    failed = score(router, sample("dict", "x", "faulty"))
    assert failed.remarks()["custom/why"] == "half"

    functions = {
        "calc": [RewardPart("math"), RewardPart("custom")],
        "text": [RewardPart("exact_match")],
    }
    with make_router(functions, custom=(FAULTY, "compute_score"), **SETTINGS) as own:
        judgement = score(own, sample("raises", "5", "calc"))
        score(own, sample("a", "a", "text"))
        score(own, sample("a", "a", "text"))
        counts = own.call_counts.take().counts

    assert isinstance(judgement.reward_result, Error) and judgement.remarks() == {
        "math/extracted": None,
        "math/wanted": "5",
    }
    by_domain = {name: number for name, number in counts.items() if name.startswith("domains/")}
    assert by_domain == {
        "domains/calc/calls": 1, "domains/calc/errors": 1, "domains/calc/timeouts": 0,
        "domains/text/calls": 2, "domains/text/errors": 0, "domains/text/timeouts": 0,
    }  # fmt: skip
    assert (counts["reward/calls"], counts["reward/errors"]) == (3, 1)


@pytest.mark.parametrize("name", ["errors", "timeouts", "all", "errors/algebra"])
def test_a_domain_whose_metrics_would_be_taken_for_others_is_refused(name):
    with pytest.raises(UserError, match=f"'{name}'.*data.domain_key"):
        check_domains({"default": [RewardPart("math")]}, ["gsm8k", name])
    check_domains({"default": [RewardPart("math")]}, ["gsm8k", "math", "mean", "my/errors"])


def test_an_episode_counts_once_however_often_its_workflow_asks(router):
    """Two calls by each of three episodes: one of the calls fails, of which the workflow makes a
    score."""

    async def twice(chat, row, reward_fn):
        await chat.ask(row.prompt)
        first = await reward_fn("a text")
        return first if first.accuracy else (await reward_fn()).accuracy

    group = new_group_of_three()
    group.row = replace(group.row, domain="faulty", ground_truth="raises")
    options = {"workflow": Workflow("twice", twice, True), "timeout_s": 60.0}
    parts = {"rollout": OneToken(), "reward_fn": router, "tokenizer": tiny_tokenizer()}
    steps = compile_steps(
        [bound(run_scored_episodes, **options), bound(reward_episodes, min_valid=2)], parts
    )

    def context_of(group, node_id) -> NodeContext:
        return context(group)

    router.call_counts.take()
    loop = RolloutLoop(
        steps,
        lambda of: group,
        context_of,
        None,
        60.0,
        GroupEvents(),
        GroupRecords(),
        call_counts=router.call_counts,
    )
    assert asyncio.run(loop.run(group, steps, context_of)) is None
    counts = loop.call_counts.take()
    assert counts[:3] == (3, 0, "") and counts.counts["reward/calls"] == 6 and group["valid"].all()
