"""Standard nodes by themselves, where a whole run would hide what they do."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from distflow.config import load_config
from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.flow.ticket import Ticket
from distflow.graph import Drop
from distflow.pipelines.nodes import greedy_baseline
from distflow.rewards.router import Judgement
from distflow.rewards.verdict import Error, Score, Timeout, Verdict
from distflow.rollout.engine import GenerateRequest, GenerateResult, Generation, SamplingParams, Stream
from distflow.runtime.context import GroupContext, NodeContext, prompts_of
from tests.tiny_models import tiny_tokenizer


class OneToken:
    """Answers each wanted sample with one token, and keeps the request."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.request = request
        return GenerateResult(tuple(Generation(sample, [7], [-0.5], [-0.5], [0], "stop") for sample in request.samples))


def run_baseline(verdict: Verdict) -> tuple[object, OneToken]:
    async def judge(batch: Batch) -> Sequence[Judgement]:
        return [Judgement(verdict) for _ in range(len(batch))]

    config = load_config("grpo", complete=False).config
    group = GroupContext(
        Ticket(5, 0, 5, 3, 0), PromptRow(5, (4, 5), "4="), SamplingParams(4), (0, 1, 2), Stream(1, "train", 0, 5)
    )
    ctx = NodeContext(config, 0, tiny_tokenizer(), judge, lambda *update: None, group=group)
    engine = OneToken()
    return asyncio.run(greedy_baseline(prompts_of(group), engine, ctx)), engine  # type: ignore[arg-type]


def test_the_baseline_is_the_score_of_one_greedy_answer_for_all_samples() -> None:
    baselines, engine = run_baseline(Score(0.75))
    assert torch.equal(baselines, torch.full((3,), 0.75))  # type: ignore[arg-type]
    assert engine.request.params.greedy and engine.request.samples == (0,)


@pytest.mark.parametrize("fault", [Error("crashed"), Timeout(1.0)])
def test_a_fault_of_the_verifier_is_no_baseline(fault: Verdict) -> None:
    dropped, _ = run_baseline(fault)
    assert isinstance(dropped, Drop) and dropped.reason == "too_few_verdicts"
