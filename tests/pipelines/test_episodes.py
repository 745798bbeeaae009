"""Episodes of a group by themselves, against an engine that fails: whatever happens, the group
ends, and says why."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from distflow.config import load_config
from distflow.data.sample import Segment
from distflow.environments.chat import Chat
from distflow.environments.workflows import Row, Workflow
from distflow.pipelines.nodes.reward_samples import reward_episodes
from distflow.pipelines.nodes.workflow_rollout import run_episodes
from distflow.rollout.engine import GenerateRequest
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import PlainCalls
from distflow.runtime.run_errors import NodeError
from tests.runtime.groups import bound, prompt_group, waiting_group
from tests.tiny_models import tiny_tokenizer

FAILS = 8
NEVER = 9
STALENESS = pytest.mark.parametrize("staleness", [0, 2])


class Engine:
    """Answers one token; a prompt that ends with one of two tokens fails, or is never answered."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        self.asked.append((request.prompt_ids, request.samples))
        await asyncio.sleep(0)
        if request.prompt_ids[-1] == FAILS:
            raise RuntimeError("the engine is out of memory")

        if request.prompt_ids[-1] == NEVER:
            await asyncio.Event().wait()
        return tuple(Segment.drawn(s, [5], [0.0], [0.0], [0], "stop") for s in request.samples)


async def run_group(
    run: Callable[..., Awaitable[object]],
    engine: Engine,
    staleness: int,
    extra_info: Mapping[str, object] | None = None,
    more: Sequence[str] = (),
    max_tokens: int = 4,
) -> Group:
    """A group of two, as the rollout loop runs it. more: keys of the config. max_tokens: of a
    response. Raises NodeError."""
    keys = [f"async.max_staleness={staleness}", *more]
    group = waiting_group(prompt_group())
    group.row = replace(group.row, extra_info=extra_info)
    group.params = replace(group.params, max_tokens=max_tokens)
    node = partial(run_episodes, workflow=Workflow("own", run, scores=False), timeout_s=60.0)
    resources = {"rollout": engine, "tokenizer": tiny_tokenizer()}
    (step,) = compile_steps([bound(node)], resources)
    config = load_config("grpo", overrides=keys, complete=False).config
    await asyncio.wait_for(
        step.on_group(
            group, NodeContext(config, 0, tiny_tokenizer(), group=group), PlainCalls(), 9.0
        ),
        60,
    )

    return group


@STALENESS
def test_what_the_engine_raises_is_the_error_of_the_group_and_ends_its_other_episodes(
    staleness: int,
) -> None:
    numbers, ended = iter((FAILS, NEVER)), list[int]()

    async def run(chat: Chat, row: Row) -> float:
        number = next(numbers)
        try:
            await chat.ask((number,))
        finally:
            ended.append(number)
        return 1.0

    async def group() -> list[int]:
        with pytest.raises(NodeError, match="the engine is out of memory"):
            await run_group(run, Engine(), staleness)
        return ended[:]

    assert asyncio.run(group()) == [FAILS, NEVER], "both have ended when the group has"


@STALENESS
def test_an_error_of_the_engine_is_raised_also_if_a_workflow_swallows_it(staleness: int) -> None:
    async def run(chat: Chat, row: Row) -> float:
        await chat.ask((7,))
        try:
            await chat.ask((FAILS,))
        except asyncio.CancelledError:
            return 1.0
        return 0.0

    with pytest.raises(NodeError, match="the engine is out of memory"):
        asyncio.run(run_group(run, Engine(), staleness))


@STALENESS
def test_a_workflow_that_cancels_itself_is_an_error_of_its_episode_alone(staleness: int) -> None:
    numbers = iter(range(2))

    async def run(chat: Chat, row: Row) -> float:
        await chat.ask((7,))
        if next(numbers):
            raise asyncio.CancelledError
        return 1.0

    group = asyncio.run(run_group(run, Engine(), staleness))
    assert sorted(sample.valid for sample in group.samples) == [False, True]
    (wrong,) = [sample for sample in group.samples if not sample.valid]
    assert "has cancelled itself" in str(wrong.outcome)


EXITS = [
    GeneratorExit("it"),
    SystemExit(3),
    KeyboardInterrupt("it"),
    BaseExceptionGroup("its", [SystemExit(3)]),
]


@STALENESS
@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("in_task", [False, True])
def test_a_workflow_that_asks_to_exit_is_an_error_of_its_episode_alone(
    staleness: int, error: BaseException, in_task: bool
) -> None:
    numbers = iter(range(2))

    async def fails() -> None:
        raise error

    async def run(chat: Chat, row: Row) -> float:
        await chat.ask((7,))
        if next(numbers):
            await (asyncio.create_task(fails()) if in_task else fails())
        return 1.0

    group = asyncio.run(run_group(run, Engine(), staleness))
    (wrong,) = [sample for sample in group.samples if not sample.valid]
    assert type(error).__name__ in str(wrong.outcome) and "test_episodes.py" in str(wrong.outcome)


def test_a_forgotten_await_is_asked_for() -> None:
    async def run(chat: Chat, row: Row) -> float:
        with closing(chat.ask((7,))) as reply:
            return float(reply.text == "7")  # type: ignore[attr-defined]

    group = asyncio.run(run_group(run, Engine(), 0))
    assert "has no attribute 'text': is `await` missing? (at test_episodes.py" in str(
        group.samples[0].outcome
    )


@STALENESS
def test_a_cancelled_group_ends_its_episodes_and_what_they_asked(staleness: int) -> None:
    async def group() -> tuple[int, int]:
        engine, ended, began = Engine(), list[int](), asyncio.Event()

        async def run(chat: Chat, row: Row) -> float:
            try:
                await chat.ask((7,))
                began.set()
                await chat.ask((NEVER,))
            finally:
                ended.append(0)

            return 1.0

        task = asyncio.ensure_future(run_group(run, engine, staleness))
        await asyncio.wait(
            (task, asyncio.ensure_future(began.wait())), return_when=asyncio.FIRST_COMPLETED
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asked = len(engine.asked)
        await asyncio.sleep(0)
        assert len(engine.asked) == asked

        return len(ended), len(asyncio.all_tasks())

    assert asyncio.run(group()) == (2, 1)


def test_a_reply_that_is_no_longer_waited_for_is_not_asked_for() -> None:
    """The first request of one episode is withdrawn before the other asks."""

    async def group() -> tuple[Group, Engine]:
        engine, withdrawn, numbers = Engine(), asyncio.Event(), iter(range(2))

        async def run(chat: Chat, row: Row) -> float:
            if next(numbers):
                await withdrawn.wait()
                await chat.ask((7,))
                return 1.0

            asking = asyncio.ensure_future(chat.ask((NEVER,)))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait((asking,))
            withdrawn.set()
            await chat.ask((7,))

            return 1.0

        return await run_group(run, engine, staleness=0), engine

    made, engine = asyncio.run(group())
    assert engine.asked == [((7,), (0, 1))] and all(sample.valid for sample in made.samples)


def test_an_episode_that_has_ended_asks_no_more() -> None:
    """A question that it still asks is withdrawn, and a later one refused; neither holds the others
    up."""
    late = list[asyncio.Task[object]]()

    async def run(chat: Chat, row: Row) -> float:
        await chat.ask((7,))
        late.append(asyncio.ensure_future(chat.fork().ask((9,))))
        late.append(asyncio.ensure_future(later(chat.fork())))
        await asyncio.sleep(0)
        return 1.0

    async def later(chat: Chat) -> object:
        while len(late) < 4 or not all(task.done() for task in late[::2]):
            await asyncio.sleep(0)
        return await chat.ask((9,))

    async def group() -> Engine:
        engine = Engine()
        await run_group(run, engine, 0)
        await asyncio.wait(late)
        return engine

    engine = asyncio.run(group())
    assert [prompt for prompt, _ in engine.asked] == [(7,)]
    assert [task.cancelled() for task in late] == [True, False, True, False]
    assert all("has ended" in str(task.exception()) for task in late[1::2])


def test_the_rest_of_the_score_is_the_last_reply_s_in_time() -> None:
    """Of the first conversation, which the sample holds before its fork; the fork has what it
    earned."""

    async def run(chat: Chat, row: Row) -> float:
        await chat.ask((7,))
        side = chat.fork()
        await side.ask((6,))
        side.reward(0.25)
        await chat.ask((4,))
        chat.fork()
        return 1.0

    group = asyncio.run(run_group(run, Engine(), 0))
    context = NodeContext(
        load_config("grpo", complete=False).config, 0, tiny_tokenizer(), group=group
    )
    written = asyncio.run(reward_episodes(group.samples, context, min_valid=2))
    assert isinstance(written, dict)
    response = [5, 4, 5, 7, 5, 6, 5]
    assert group.batch()["response_ids"][0].tolist() == response
    assert written["token_level_scores"].tolist() == [0, 0, 0.75, 0, 0, 0, 0.25] * 2
    assert written["turn_index"].tolist() == [0, -1, 1, -1, -1, -1, 2] * 2


def test_what_an_episode_changes_in_its_row_no_other_sees() -> None:
    seen = list[list[int]]()

    async def run(chat: Chat, row: Row) -> float:
        row.columns["tokens"].append(8)
        seen.append(list(row.extra_info["tokens"]))
        await chat.ask((7,))
        return 1.0

    shared = [1, 2]
    asyncio.run(run_group(run, Engine(), 0, {"tokens": shared}))
    assert seen == [[1, 2, 8]] * 2 and shared == [1, 2]
