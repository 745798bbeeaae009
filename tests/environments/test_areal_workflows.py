"""Workflows of AReaL's form: what their engine gives, and that a trajectory is what was drawn."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import torch

from distflow.data.sample import Segment
from distflow.environments.areal_workflows import ArealWorkflow
from distflow.environments.chat import Chat, ChatError, Limits, Prompt
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.workflows import Row, make_workflow
from tests.environments.areal_user import (
    GenerationHyperparameters,
    ModelRequest,
    MultiTurnWorkflow,
    RLVRWorkflow,
)
from tests.tiny_models import tiny_tokenizer

Trajectory = dict[str, Any]
REQUEST = GenerationHyperparameters(max_new_tokens=4)
PROMPT = (5, 6, 7)


class Drawn:
    """Draws tokens that follow from the call's number, two a call; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int, tuple[str | int, ...], int]] = []

    async def __call__(
        self, prompt: tuple[int, ...], most: int, stop: tuple[str | int, ...], num_drawn: int
    ) -> Segment:
        await asyncio.sleep(0)
        self.asked.append((prompt, most, stop, num_drawn))
        number = len(self.asked)
        tokens = (10 * number, 10 * number + 1)[:most]
        log_probs = tuple(-0.1 * token for token in tokens)
        versions = (number,) * len(tokens)
        return Segment.drawn(0, tokens, log_probs, log_probs, versions, "stop")


class Theirs:
    def __init__(self, run: Callable[[Any, dict[str, Any]], Awaitable[Any]]) -> None:
        self.arun_episode = run


def played(
    theirs: Any, drawn: Drawn | None = None, response: int = 20
) -> tuple[Chat, float | None]:
    chat = Chat(
        TurnTokens(tiny_tokenizer(), (), {}),
        drawn or Drawn(),
        Limits(response, response + 10),
        False,
    )
    chat.sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "greedy": False}
    row = Row(Prompt("ab", PROMPT), "7", columns={"answer": "7"})

    return chat, asyncio.run(ArealWorkflow(theirs)(chat, row))


def trajectory(*responses: Any) -> Trajectory:
    """Of several turns, the first of whose prompts is whole and the others what came in between."""
    seq: list[int] = []
    columns: dict[str, list[Any]] = {"loss_mask": [], "logprobs": [], "versions": []}
    for response in responses:
        given = response.input_tokens[len(seq) :]
        seq += given + response.output_tokens
        columns["loss_mask"] += [0] * len(given) + [1] * response.output_len
        columns["logprobs"] += [0.0] * len(given) + response.output_logprobs
        columns["versions"] += [-1] * len(given) + response.output_versions

    shape = {name: torch.tensor([values]) for name, values in {"input_ids": seq, **columns}.items()}
    return {**shape, "rewards": torch.tensor([0.5])}


def two_turns(change: Callable[[Trajectory], object] = lambda row: None) -> Theirs:
    async def run(engine: Any, data: dict[str, Any]) -> Trajectory:
        first = await engine.agenerate(ModelRequest("a", list(PROMPT), REQUEST))
        second = await engine.agenerate(
            ModelRequest("a", [*first.input_tokens, *first.output_tokens, 8, 9], REQUEST)
        )
        row = trajectory(first, second)
        change(row)
        return row

    return Theirs(run)


def test_a_trajectory_becomes_segments_with_what_was_drawn() -> None:
    chat, reward = played(two_turns())
    assert reward == 0.5 and chat.turns == 2 and chat.finish_reason == "stop"
    drawn = [(-0.1 * 10, -0.1 * 11), (-0.1 * 20, -0.1 * 21)]
    assert chat.segments == [
        Segment("prompt", PROMPT),
        Segment("policy", (10, 11), drawn[0], drawn[0], (1, 1), finish_reason="stop"),
        Segment("environment", (8, 9)),
        Segment("policy", (20, 21), drawn[1], drawn[1], (2, 2), finish_reason="stop"),
    ]


class OlderName:
    """With the other name of the method."""

    async def run_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory | None:
        return await two_turns().arun_episode(engine, data)


def test_the_method_may_be_called_run_episode() -> None:
    assert make_workflow("older", OlderName(), {}).scores is False
    chat, reward = played(OlderName())
    assert reward == 0.5 and chat.turns == 2


def put(name: str, place: int, value: float) -> Callable[[Trajectory], object]:
    def change(row: Trajectory) -> None:
        row[name][0, place] = value

    return change


def set_all(**values: Any) -> Callable[[Trajectory], object]:
    return lambda row: row.update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("loss_mask", 5, 1), r"loss_mask .* token 5 \(8\)"),
        (put("input_ids", 3, 99), r"loss_mask .* token 3 \(99\)"),
        (put("input_ids", 0, 99), r"loss_mask .* token 3 \(10\)"),
        (
            set_all(**{name: torch.zeros(2, 3) for name in ("input_ids", "loss_mask")}),
            "returned 2 rows of 'input_ids'",
        ),
        (
            set_all(loss_mask=torch.tensor([[1, 1]])),
            "9 input_ids, 2 loss_mask",
        ),
        (
            set_all(attention_mask=torch.ones(1, 4)),
            "4 attention_mask, 9 input_ids",
        ),
        (set_all(rewards=torch.tensor([0.5, 0.5])), r"returned 2 rewards.*rollout\.n"),
        (lambda row: row.pop("rewards"), "return None, or tensors by name"),
    ],
)
def test_a_trajectory_that_was_not_drawn_is_an_error(
    change: Callable[[Trajectory], object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        played(two_turns(change))


def test_none_rejects_and_padding_is_cut() -> None:
    async def none(engine: Any, data: dict[str, Any]) -> None:
        await engine.agenerate(ModelRequest("a", list(PROMPT), REQUEST))

    assert played(Theirs(none))[1] is None

    def pad(row: Trajectory) -> None:
        length = row["input_ids"].shape[1]
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            row[name] = torch.nn.functional.pad(row[name], (2, 3))
        row["attention_mask"] = torch.nn.functional.pad(torch.ones(1, length), (2, 3)).bool()

    assert played(two_turns(pad))[0].segments == played(two_turns())[0].segments


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.6}, {"greedy": True}, {"top_k": 5}, {"n_samples": 4}]
)
def test_sampling_other_than_the_runs_is_refused(changed: dict[str, Any]) -> None:
    (name,) = changed

    async def run(engine: Any, data: dict[str, Any]) -> None:
        await engine.agenerate(ModelRequest("a", list(PROMPT), REQUEST.new(**changed)))

    with pytest.raises(ChatError, match=rf"gconfig\.{name}="):
        played(Theirs(run))


def test_requests_at_once_continue_one_random_stream_and_end_at_the_limits() -> None:
    drawn = Drawn()
    seen = list[Any]()
    own = REQUEST.new(stop=["x"], stop_token_ids=[3], max_new_tokens=100)

    async def run(engine: Any, data: dict[str, Any]) -> Trajectory:
        assert engine.get_version() == 0
        request = partial(engine.agenerate, ModelRequest("a", list(PROMPT), own))
        seen.extend(await asyncio.gather(*(request() for _ in range(3))))
        full = await engine.agenerate(ModelRequest("a", [*PROMPT, *range(8)], own))
        assert (full.output_tokens, full.stop_reason, engine.get_version()) == ([], "length", 3)
        return trajectory(seen[1])

    chat, _ = played(Theirs(run), drawn, response=8)
    assert drawn.asked == [(PROMPT, 8, ("x", 3), 2 * number) for number in range(3)]
    assert [response.output_tokens for response in seen] == [[10, 11], [20, 21], [30, 31]]
    assert chat.segments[1].token_ids == (20, 21)


def test_areals_own_workflows_run_unchanged() -> None:
    tokenizer = tiny_tokenizer()
    totals: list[int] = []

    def reward(
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        ids: list[int],
        *,
        answer: str,
        **_: Any,
    ) -> float:
        totals.append(sum(ids))
        return float(sum(ids) == 41 and answer == "7")

    chat, score = played(RLVRWorkflow(reward, REQUEST, tokenizer))
    assert score == 0.0 and [segment.owner for segment in chat.segments] == ["prompt", "policy"]
    chat, score = played(MultiTurnWorkflow(reward, REQUEST, tokenizer, 3, 0.5, [8, 9]))
    assert totals == [21, 21, 41] and score == 0.5
    between = (tokenizer.eos_token_id, 8, 9)
    assert [segment.token_ids for segment in chat.segments[1:]] == [(10, 11), between, (20, 21)]


def test_several_samples_are_as_many_episodes() -> None:
    def reward(
        prompt: str, completion: str, prompt_ids: list[int], ids: list[int], **_: Any
    ) -> float:
        return float(sum(ids))

    chat, score = played(RLVRWorkflow(reward, REQUEST.new(n_samples=3), tiny_tokenizer()))
    assert score == 21.0 and chat.turns == 1 and chat.segments[1].token_ids == (10, 11)
