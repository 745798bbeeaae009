"""A user's rollout node that asks the engine twice for a sample, with given tokens between: it
trains rightly, the checks follow both requests, and faults of such nodes are found."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.errors import TrustError
from distflow.pipelines.nodes import generate
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow

GRPO = ("grpo", "dag.pipeline=tests.e2e.two_turns_node:two_turns", "trust.check_freq=1")
GIVEN = 2  # tokens of the node's "=?"


@pytest.fixture
def example():
    """The node's module, as the run imports it."""
    return import_module("tests.e2e.two_turns_node")


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_two_turns_train_and_every_check_passes(playground, example, max_staleness):
    steps = (
        "trainer.total_training_steps=4",
        f"async.max_staleness={max_staleness}",
        "trainer.save_groups=all",
    )
    run = playground.run(*GRPO, *steps)
    assert not run.notes("warning")
    found = run.checks()
    assert len(found) == 4

    for step in found:
        assert set(step["not_checked"]) == {"responses"} and {
            "turns",
            "masks",
            "versions",
            "draws",
            "loss",
        } <= {*step["passed"]}

    turns = 0
    for path in sorted((run.folder / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        for mask, trained in zip(batch["response_mask"], batch["loss_mask"], strict=True):
            edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            assert len(edges) == 4 and edges[0] == 0 and edges[2] - edges[1] == GIVEN, (
                "two turns, given tokens between"
            )
            assert torch.equal(mask, trained)
            turns += 2

    assert turns == 4 * 4 * 4 * 2


def learns_the_given(sample: Sample) -> list[Segment]:
    prompt, first, given, second = sample.segments
    numbers = (-1.0,) * GIVEN
    return [
        prompt,
        first,
        Segment("policy", given.token_ids, numbers, numbers, second.versions[:1] * GIVEN),
        second,
    ]


def shifts_the_second(sample: Sample) -> list[Segment]:
    *before, second = sample.segments
    return [
        *before,
        replace(
            second,
            rollout_log_probs=second.rollout_log_probs[1:] + second.rollout_log_probs[:1],
        ),
    ]


def masks_the_second(sample: Sample) -> list[Segment]:
    *before, second = sample.segments
    return [*before, Segment("tool", second.token_ids)]


def forgets_the_given(sample: Sample) -> list[Segment]:
    prompt, first, _, second = sample.segments
    return [prompt, first, second]


# a memory
def takes_anothers_first(sample: Sample, seen: dict[int, Segment] = {}) -> list[Segment]:  # noqa: B006
    prompt, first, *after = sample.segments
    return [prompt, seen.setdefault(sample.group_index, first), *after]


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (
            learns_the_given,
            r"token \d+ of sample \d+-\d counts as the policy's, ",
        ),
        (shifts_the_second, r"rollout_log_probs of sample .* by the engine"),
        (masks_the_second, r"token \d+ of sample \d+-\d counts as given, "),
        (forgets_the_given, "counts as the policy's, "),
        (takes_anothers_first, "counts as the policy's, "),
    ],
)
def test_a_fault_in_the_sample_is_found(playground, example, monkeypatch, fault, found):
    def planted(sample: Sample, **changes: Any) -> Sample:
        whole = replace(sample, **changes)
        return replace(whole, segments=fault(whole))

    monkeypatch.setattr(example, "replace", planted)
    with pytest.raises(TrustError, match=rf"\(turns\): .*{found}"):
        playground.run(*GRPO, "trainer.total_training_steps=1")


def test_a_turn_that_goes_on_from_anothers_is_found(playground, example, monkeypatch):
    async def mixed(*inputs: Any) -> list[Sample]:
        samples = await generate(*inputs)
        return [
            replace(sample, segments=other.segments)
            for sample, other in zip(samples, samples[::-1], strict=True)
        ]

    monkeypatch.setattr(example, "generate", mixed)
    with pytest.raises(TrustError, match=r"\(turns\): .* no request"):
        playground.run(*GRPO, "trainer.total_training_steps=1")
