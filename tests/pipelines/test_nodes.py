"""Standard nodes by themselves, where a whole run would hide what they do."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from distflow.config import load_config
from distflow.data.prompts import PromptRow
from distflow.data.sample import Sample
from distflow.flow.ticket import Ticket
from distflow.graph import Drop
from distflow.pipelines.nodes import greedy_baseline
from distflow.pipelines.nodes.experience import generate, judge_samples, load_answers
from distflow.rewards.router import Judgement
from distflow.rewards.verdict import Error, Score, Timeout, Verdict
from distflow.rollout.engine import GenerateRequest, GenerateResult, Generation, SamplingParams
from distflow.runtime.context import NodeContext
from distflow.runtime.group import Group, new_group
from tests.tiny_models import tiny_tokenizer


class OneToken:
    """Answers each wanted sample with one token, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        return GenerateResult(tuple(Generation(sample, [7], [-0.5], [-0.5], [3], "stop") for sample in request.samples))


class Verdicts:
    """A judge that gives the same verdicts whoever asks, and keeps what it was asked."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts, self.asked = verdicts, list[Sequence[Sample]]()

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Judgement]:
        self.asked.append(samples)
        return [Judgement(verdict, {"custom": verdict}) for verdict in self.verdicts]


def new_group_of_three() -> Group:
    row = PromptRow(5, (4, 5), "4=", ground_truth="4", domain="sums", response_ids=(7, 8))
    return new_group(Ticket(5, 0, 5, 3, 0), row, SamplingParams(4), seed=1)


def answered() -> Group:
    group, engine = new_group_of_three(), OneToken()
    group.samples = asyncio.run(generate(group, engine, tiny_tokenizer()))  # type: ignore[arg-type]
    return group


def context(group: Group, validating: bool = False) -> NodeContext:
    return NodeContext(
        load_config("grpo", complete=False).config, 0, tiny_tokenizer(), group=group, validating=validating
    )


def judged(*verdicts: Verdict, min_valid: int = 2, validating: bool = False) -> object:
    group = answered()
    ctx = context(group, validating)
    return asyncio.run(judge_samples(group.samples, Verdicts(*verdicts), ctx, min_valid=min_valid))  # type: ignore[arg-type]


def run_baseline(verdict: Verdict) -> tuple[object, OneToken, Verdicts, Group]:
    group, engine, judge = answered(), OneToken(), Verdicts(verdict)
    made = asyncio.run(greedy_baseline(group, engine, judge, tiny_tokenizer()))  # type: ignore[arg-type]
    return made, engine, judge, group


def test_an_answer_is_a_sample_of_the_row_with_what_the_engine_says_of_it() -> None:
    group = answered()
    assert [sample.uid for sample in group.samples] == ["5-0", "5-1", "5-2"]
    batch = group.batch()
    assert batch["ground_truth"] == ["4"] * 3 and batch["domain"] == ["sums"] * 3
    assert batch["prompt_ids"].tolist() == [[4, 5]] * 3 and batch["response_ids"].tolist() == [[7]] * 3
    assert batch["rollout_log_probs"].tolist() == [[-0.5]] * 3 and batch["versions"].tolist() == [[3]] * 3
    assert batch["responses"] == [tiny_tokenizer().decode([7])] * 3


def test_the_answer_of_the_data_is_one_sample_made_by_the_policy() -> None:
    group = new_group_of_three()
    (sample,) = asyncio.run(load_answers(group, tiny_tokenizer()))
    group.samples = [sample]
    batch = group.batch()
    assert batch["response_ids"].tolist() == [[7, 8]] and batch["response_mask"].tolist() == [[1, 1]]
    assert batch["responses"] == [tiny_tokenizer().decode([7, 8])]


def test_a_verdict_for_each_sample_and_none_is_made_up() -> None:
    written = judged(Score(1.0, {"why": "right"}), Error("crashed"), Score(0.5))
    assert isinstance(written, dict)
    assert written["scores"] == [1.0, 0.0, 0.5] and written["valid"] == [True, False, True]
    assert written["reward_parts"] == [{"custom": 1.0}, {}, {"custom": 0.5}]
    assert written["reward_extra"] == [{"why": "right"}, {}, {}]
    assert written["reward_errors"][0] is None and "crashed" in written["reward_errors"][1]


def test_a_group_with_too_few_verdicts_to_compare_is_dropped_and_says_why() -> None:
    faults = (Score(1.0), Error("crashed"), Timeout(1.0))
    dropped = judged(*faults)
    assert isinstance(dropped, Drop) and dropped.reason == "too_few_verdicts" and "crashed" in dropped.detail
    assert not isinstance(judged(*faults, min_valid=1), Drop), "an estimator that compares nothing takes it"
    assert not isinstance(judged(*faults, validating=True), Drop), "a validation counts it as wrong"


def test_the_baseline_is_the_score_of_one_greedy_answer_for_all_samples() -> None:
    baselines, engine, judge, group = run_baseline(Score(0.75))
    assert isinstance(baselines, torch.Tensor) and torch.equal(baselines, torch.full((3,), 0.75))
    (request,) = engine.requests
    assert request.params.greedy and request.samples == (0,)
    assert [len(samples) for samples in judge.asked] == [1]
    assert len(group.samples) == 3 and not group.written, "the group itself is as it was"


@pytest.mark.parametrize("fault", [Error("crashed"), Timeout(1.0)])
def test_a_fault_of_the_verifier_is_no_baseline(fault: Verdict) -> None:
    dropped, *_ = run_baseline(fault)
    assert isinstance(dropped, Drop) and dropped.reason == "too_few_verdicts"
