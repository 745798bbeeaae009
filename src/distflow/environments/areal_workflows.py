"""Runs unmodified AReaL workflows: `arun_episode(engine, data)` requests responses in tokens from
an engine and returns the trajectory as tensors, whose tokens and mask must be what it drew."""

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import compress, groupby, takewhile
from operator import eq
from typing import Any

from distflow.data.sample import Segment
from distflow.environments.chat import Chat, ChatError
from distflow.user_values import finite_number

METHODS = ("arun_episode", "run_episode")
"""Names of the async method `f(engine, data)`; the first that the object has is called."""
_NEEDED = "tensors by name with input_ids, loss_mask and rewards"
_COLUMNS = ("attention_mask", "input_ids", "loss_mask")
_FIXED: dict[str, Any] = {
    "n_samples": 1,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
}
"""Settings that a request's `gconfig` cannot change."""


@dataclass(frozen=True)
class ModelResponse:
    """The result of `agenerate`."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str
    """stop, or length if it was truncated or had no room."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


@dataclass(eq=False)
class _Call:
    """A request of the episode, and its response."""

    prompt: list[int]
    drawn: Segment
    finish_reason: str


class Engine:
    """The `engine` of an episode. Its requests run one after another: the random stream of each
    continues the last."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._turn = asyncio.Lock()
        self.calls: list[_Call] = []

    def get_version(self) -> int:
        """The version of the newest weights that the episode has seen."""
        newest = self._chat.version
        for call in self.calls:
            newest = max([newest, *call.drawn.versions])
        return newest

    async def agenerate(self, req: Any) -> ModelResponse:
        """req: has `input_ids` and a `gconfig`, of which `max_new_tokens`, `stop` and
        `stop_token_ids` apply. Raises ChatError if the rest differs from the run's sampling."""
        prompt = [int(token) for token in req.input_ids]
        self._check_sampling(req.gconfig)
        if not prompt:
            raise ChatError("agenerate: input_ids is empty")

        self._chat.turns += 1
        with self._chat.clock_stopped(""):
            await self._turn.acquire()

        try:
            return await self._respond(prompt, req.gconfig)
        finally:
            self._turn.release()

    def _check_sampling(self, gconfig: Any) -> None:
        for name, wanted in {**_FIXED, **self._chat.sampling}.items():
            own = getattr(gconfig, name, wanted)
            if own == wanted or (name == "top_k" and _take_all_tokens(own, wanted)):
                continue

            raise ChatError(
                f"agenerate: gconfig.{name}={own!r}, and here it is {wanted!r}: the run's sampling "
                "is that of actor_rollout_ref.rollout, and each request is one response (rollout.n "
                "is the size of a group)"
            )

    async def _respond(self, prompt: list[int], gconfig: Any) -> ModelResponse:
        chat = self._chat
        num_prompt = len(prompt)  # of the conversation's first request
        for call in self.calls:
            if prompt[: len(call.prompt)] == call.prompt:
                num_prompt = min(num_prompt, len(call.prompt))

        response_room = chat.limits.response - (len(prompt) - num_prompt)
        room = min(response_room, chat.limits.context - len(prompt))
        if room < 1:
            await asyncio.sleep(0)  # so that a workflow that asks forever reaches its deadline
            return ModelResponse(prompt, [], [], [], "length")

        most = min(getattr(gconfig, "max_new_tokens", None) or room, room)
        stop_texts = getattr(gconfig, "stop", None) or ()
        stop_tokens = getattr(gconfig, "stop_token_ids", None) or ()
        stop = (*stop_texts, *map(int, stop_tokens))
        num_drawn = sum(len(call.drawn.token_ids) for call in self.calls)
        drawn = await chat.generate(tuple(prompt), most, stop, num_drawn)
        reason = "stop" if drawn.finish_reason == "stop" else "length"
        is_cut_by_limit = reason == "length" and most == room
        self.calls.append(_Call(list(prompt), drawn, "length" if is_cut_by_limit else "stop"))

        return ModelResponse(
            prompt,
            list(drawn.token_ids),
            list(drawn.rollout_log_probs),
            list(drawn.versions),
            reason,
        )


def _take_all_tokens(*top_k: int) -> bool:
    """Whether one of two numbers is AReaL's form of no limit, and the other is ours."""
    return max(top_k) >= 10**6 and min(top_k) < 1


class ArealWorkflow:
    """A workflow that runs the `arun_episode`, or `run_episode`, of a user's object."""

    def __init__(self, theirs: Any) -> None:
        gconfig: Any = getattr(theirs, "gconfig", None)
        if getattr(gconfig, "n_samples", 1) > 1:  # here they are as many episodes: rollout.n
            theirs.gconfig = copy(gconfig)
            theirs.gconfig.n_samples = 1
        self._run = next(getattr(theirs, name) for name in METHODS if hasattr(theirs, name))

    async def __call__(self, chat: Chat, row: Any) -> float | None:
        """The reward of an episode; None if it is rejected. row: a `Row`. Raises ValueError if the
        trajectory was not drawn by the engine."""
        messages = row.prompt.as_messages
        chat.check_contents(messages)  # to which the object applies the template

        # as a str for rewards
        columns = {name: value for name, value in row.columns.items() if name != "prompt"}
        engine = Engine(chat)
        returned = await self._run(engine, {**columns, "messages": messages})
        if returned is None:
            return None

        columns, reward = _trajectory(returned)
        _set_segments(chat, engine.calls, columns)
        return finite_number(reward, "arun_episode returned", " as 'rewards'")


def _trajectory(returned: Any) -> tuple[dict[str, list[Any]], object]:
    """The tokens and the mask, without padding, and the reward. returned: tensors with one row, or
    a list of one such. Raises ValueError for anything else."""
    if isinstance(returned, list | tuple) and returned:
        returned = _only("trajectories", returned)
    if not isinstance(returned, Mapping) or {"input_ids", "loss_mask", "rewards"} - {*returned}:
        raise ValueError(f"arun_episode returned {returned!r:.80}: return None, or {_NEEDED}")

    columns = {name: _only_row(name, returned[name]) for name in _COLUMNS if name in returned}
    if len({len(values) for values in columns.values()}) > 1:
        lengths = ", ".join(f"{len(values)} {name}" for name, values in columns.items())
        raise ValueError(f"arun_episode returned rows of different lengths: {lengths}")

    shown = columns.pop("attention_mask", [True] * len(columns["input_ids"]))
    kept = {name: list(compress(values, shown)) for name, values in columns.items()}
    return kept, _only("rewards", _only_row("rewards", returned["rewards"]))


def _only_row(name: str, values: Any) -> list[Any]:
    """The values of a tensor with one row, which need not be in a list."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list) and values and isinstance(values[0], list):
        return list(_only(f"rows of '{name}'", values))
    return values if isinstance(values, list) else [values]


def _only(what: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(
            f"arun_episode returned {len(values)} {what}, and an episode is one: "
            "actor_rollout_ref.rollout.n is the number of samples of a prompt"
        )
    return values[0]


def _set_segments(chat: Chat, calls: Sequence[_Call], columns: Mapping[str, list[Any]]) -> None:
    """Store the trajectory as segments of the chat. Raises ValueError if the mask is on a token
    that was not drawn there."""
    ids = [int(token) for token in columns["input_ids"]]
    drawn_by = _drawn_by(ids, calls)

    trained: list[_Call | None] = [None] * len(ids)  # the call of each token that is trained
    num_prompt = len(ids)
    for place in compress(range(len(ids)), columns["loss_mask"]):
        call = drawn_by.get(place)
        if call is None:
            raise ValueError(
                f"arun_episode returned a loss_mask that is on for token {place} ({ids[place]}), "
                "which the engine did not draw after the tokens before it"
            )

        trained[place] = call
        num_prompt = min(num_prompt, len(call.prompt))
        chat.finish_reason = call.finish_reason

    if len(ids) - num_prompt > chat.limits.response or len(ids) > chat.limits.context:
        raise ValueError(
            f"arun_episode returned {len(ids)} tokens, {num_prompt} of them a prompt: more than "
            "the limits"
        )

    chat.segments = [Segment("prompt", tuple(ids[:num_prompt]))]
    for call, run in groupby(range(num_prompt, len(ids)), key=trained.__getitem__):
        places = list(run)
        if call is None:
            given = tuple(ids[place] for place in places)
            chat.segments.append(Segment("environment", given))
            continue

        begin = places[0] - len(call.prompt)
        chat.segments.append(call.drawn.part(slice(begin, begin + len(places))))


def _drawn_by(ids: list[int], calls: Sequence[_Call]) -> dict[int, _Call]:
    """The call that drew each token of the trajectory, by the token's place. If several calls may
    have drawn it, it is the one with most of the trajectory's tokens, then the last."""
    found = dict[int, _Call]()
    for call in sorted(calls, key=lambda call: _num_same(ids, call)):
        begin = len(call.prompt)
        found.update(dict.fromkeys(range(begin, begin + _num_same(ids, call)), call))
    return found


def _num_same(ids: list[int], call: _Call) -> int:
    """How many drawn tokens of a call the trajectory has, directly after the call's prompt."""
    start = len(call.prompt)
    if ids[:start] != call.prompt:
        return 0
    return sum(takewhile(bool, map(eq, ids[start:], call.drawn.token_ids)))
