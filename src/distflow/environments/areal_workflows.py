"""Runs unmodified AReaL workflows: `arun_episode(engine, data)` requests responses in tokens from
an engine and returns the trajectory as tensors, which is checked against what the engine drew."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby, takewhile
from operator import eq
from typing import Any, NamedTuple

from distflow.data.sample import Segment
from distflow.environments.chat import Chat, ChatError
from distflow.user_values import finite_number

METHODS = ("arun_episode", "run_episode")
"""Names of the async method `f(engine, data)`; the first that the object has is called."""
_NEEDED = "tensors by name with input_ids, loss_mask and rewards"
_COLUMNS = ("attention_mask", "input_ids", "loss_mask", "logprobs", "versions")
LIMIT = 1e-5
"""Limit of the difference between two log-probs, one of which was a float32."""
_FIXED: dict[str, Any] = {
    "n_samples": 1,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
}
"""Settings that a request's `gconfig` cannot change."""


@dataclass(frozen=True)
class ModelResponse:
    """The result of `agenerate`. stop_reason: "stop", or "length" if it was truncated or had no
    room."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class _Call(NamedTuple):
    prompt: list[int]
    drawn: Segment
    finish_reason: str


@dataclass(eq=False)
class _Row:
    """A sample of the episode. Its requests run one after another: the random stream of each
    continues the last."""

    chat: Chat
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: list[_Call] = field(default_factory=list)
    num_asked: int = 0


class Engine:
    """The `engine` of an episode. rows: its samples. A request belongs to the row that it
    continues, else to the one with the fewest requests."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self.rows = [_Row(chat) for chat in chats]

    def get_version(self) -> int:
        """The version of the newest weights that the episode has seen."""
        calls = [call for row in self.rows for call in row.calls]
        return max(
            [
                self.rows[0].chat.version,
                *(version for call in calls for version in call.drawn.versions),
            ]
        )

    async def agenerate(self, req: Any) -> ModelResponse:
        """req: has `input_ids` and a `gconfig`, of which `max_new_tokens`, `stop` and
        `stop_token_ids` apply. Raises ChatError if the rest differs from the run's sampling."""
        prompt = [int(token) for token in req.input_ids]
        gconfig = req.gconfig
        for name, wanted in {**_FIXED, **self.rows[0].chat.sampling}.items():
            own = getattr(gconfig, name, wanted)
            if own != wanted and not (
                name == "top_k" and max(own, wanted) >= 10**6 and min(own, wanted) < 1
            ):
                raise ChatError(
                    f"agenerate: gconfig.{name}={own!r}, and here it is {wanted!r}: the run's "
                    "sampling is that of "
                    "actor_rollout_ref.rollout, and each request is one response (rollout.n is the "
                    "size of a group)"
                )
        if not prompt:
            raise ChatError("agenerate: input_ids is empty")
        row = min(self.rows, key=lambda row: (-_num_continued(prompt, row.calls), row.num_asked))
        row.chat.turns += 1
        row.num_asked += 1
        with row.chat.clock_stopped(""):
            await row.turn.acquire()
        try:
            return await _respond(row.chat, row.calls, prompt, gconfig)
        finally:
            row.turn.release()


async def _respond(
    chat: Chat, calls: list[_Call], prompt: list[int], gconfig: Any
) -> ModelResponse:
    begins = min(
        (len(c.prompt) for c in calls if prompt[: len(c.prompt)] == c.prompt), default=len(prompt)
    )
    room = min(chat.limits.response - len(prompt) + begins, chat.limits.context - len(prompt))
    drawn = Segment("policy", ())
    reason = "length"
    if room > 0:
        most = getattr(gconfig, "max_new_tokens", None) or room
        stop = (
            *(getattr(gconfig, "stop", None) or ()),
            *map(int, getattr(gconfig, "stop_token_ids", None) or ()),
        )
        num_drawn = sum(len(call.drawn.token_ids) for call in calls)
        drawn, reason = await chat.generate(tuple(prompt), min(most, room), stop, num_drawn)
        # cut by the workflow's own limit, not the episode's
        is_whole = reason == "length" and most < room
        calls.append(_Call(prompt, drawn, "stop" if is_whole else reason))
    else:
        await asyncio.sleep(0)  # so that a workflow that asks forever reaches its deadline
    tokens = list(drawn.token_ids)
    log_probs = list(drawn.log_probs)
    versions = list(drawn.versions)
    return ModelResponse(
        list(prompt), tokens, log_probs, versions, "stop" if reason == "stop" else "length"
    )


class ArealWorkflow:
    """A workflow that runs the `arun_episode`, or `run_episode`, of a user's object. num_rows: the
    samples that each episode returns, from the `n_samples` of the object's `gconfig`."""

    def __init__(self, theirs: Any) -> None:
        self._run = next(getattr(theirs, name) for name in METHODS if hasattr(theirs, name))
        self.num_rows = max(1, int(getattr(getattr(theirs, "gconfig", None), "n_samples", 1)))

    async def __call__(
        self, chats: Chat | list[Chat], row: Any
    ) -> float | list[float | None] | None:
        """chats: a list if episodes have several samples, one chat for each. row: a `Row`. Returns
        the reward, or None if it rejects the episode; of each chat in a list, None for those
        without a trajectory. Raises ValueError if a trajectory was not drawn by the engine."""
        engine = Engine(chats if isinstance(chats, list) else [chats])
        prompt = row.prompt
        messages = [dict(message) for message in prompt.messages] or [
            {"role": "user", "content": str(prompt)}
        ]
        engine.rows[0].chat.check_contents(messages)  # to which the object applies the template
        # as a str for rewards
        columns = {name: value for name, value in row.columns.items() if name != "prompt"}
        found = _rows(await self._run(engine, {**columns, "messages": messages}))
        if len(found) > len(engine.rows):
            raise ValueError(
                f"arun_episode returned {len(found)} rows, and its episodes are of "
                f"{len(engine.rows)}: that many is "
                "n_samples of the object's gconfig (1 without one)"
            )
        rewards = dict[_Row, float]()
        for each in found:
            ids = [int(token) for token in each["input_ids"]]
            left = [own for own in engine.rows if own not in rewards]
            own = max(left, key=lambda own: sum(_num_same(ids, call) for call in own.calls))
            rewards[own] = finite_number(
                each.pop("rewards"), "arun_episode returned", " as 'rewards'"
            )
            _set_segments(own.chat, own.calls, each)
        scores = [rewards.get(own) for own in engine.rows]
        return scores if isinstance(chats, list) else scores[0]


def _rows(returned: Any) -> list[dict[str, Any]]:
    """The trajectories that a workflow returned, without padding: tensors with a row of each, or a
    list of such. Raises ValueError for anything else."""
    if returned is None:
        return []
    if isinstance(returned, list | tuple):
        return [row for each in returned for row in _rows(each)]
    if not isinstance(returned, Mapping) or {"input_ids", "loss_mask", "rewards"} - {*returned}:
        raise ValueError(f"arun_episode returned {returned!r:.80}: return None, or {_NEEDED}")
    columns = {name: _values(returned[name]) for name in _COLUMNS if name in returned}
    rewards = _values(returned["rewards"])[0]
    counts = {name: len(values) for name, values in {**columns, "rewards": rewards}.items()}
    if len({*counts.values()}) > 1:
        numbers = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise ValueError(f"arun_episode returned different numbers of rows: {numbers}")
    rows = []
    for number, reward in enumerate(rewards):
        own = {name: values[number] for name, values in columns.items()}
        if len({*map(len, own.values())}) > 1:
            lengths = ", ".join(f"{len(values)} {name}" for name, values in own.items())
            raise ValueError(f"arun_episode returned rows of different lengths: {lengths}")
        shown = own.pop("attention_mask", [True] * len(own["input_ids"]))  # remove padding
        rows.append(
            {
                **{name: [*compress(values, shown)] for name, values in own.items()},
                "rewards": reward,
            }
        )
    return rows


def _values(values: Any) -> list[list[Any]]:
    """The values of each row; a single row need not be in a list."""
    values = values.tolist() if hasattr(values, "tolist") else values
    rows = values if isinstance(values, list) else [values]
    return rows if rows and isinstance(rows[0], list) else [rows]


def _set_segments(chat: Chat, calls: Sequence[_Call], columns: Mapping[str, list[Any]]) -> None:
    """Store the trajectory as segments of the chat. Raises ValueError if the mask is on a token
    that was not drawn there, or a log-prob or version differs from the draw's."""
    ids = [int(token) for token in columns["input_ids"]]
    places = dict[int, tuple[int, int]]()
    for same, number in sorted(
        ((_num_same(ids, call), number) for number, call in enumerate(calls)), reverse=True
    ):
        for place in range(same):  # for drawn tokens: the call, and the position in it
            places.setdefault(len(calls[number].prompt) + place, (number, place))
    owners = [-1] * len(ids)
    for place in compress(range(len(ids)), columns["loss_mask"]):
        if place not in places:
            raise ValueError(
                f"arun_episode returned a loss_mask that is on for token {place} ({ids[place]}), "
                "which the engine did "
                "not draw after the tokens before it"
            )
        owners[place], own = places[place]
        drawn = calls[owners[place]].drawn
        for name, value, limit in (
            ("logprobs", drawn.log_probs[own], LIMIT),
            ("versions", drawn.versions[own], 0),
        ):
            found = columns[name][place] if name in columns else value
            if not abs(found - value) <= limit * max(abs(value), 1.0):
                raise ValueError(
                    f"arun_episode returned {found:g} in {name} for token {place}, drawn with "
                    f"{value:g}"
                )
    begins = min((len(calls[owner].prompt) for owner in owners if owner >= 0), default=len(ids))
    for place, (number, own) in places.items():
        size = len(calls[number].drawn.token_ids)
        is_whole = places.get(place - own + size - 1) == (number, size - 1)
        if place >= begins and owners[place] < 0 and (is_whole or number in owners):
            raise ValueError(
                f"arun_episode returned a loss_mask that is off for token {place} ({ids[place]}), "
                "which the engine "
                "sampled after the first trained token: end the trajectory before it, or train on "
                "it"
            )
    if len(ids) - begins > chat.limits.response or len(ids) > chat.limits.context:
        raise ValueError(
            f"arun_episode returned {len(ids)} tokens, {begins} of them a prompt: more than the "
            "limits"
        )
    chat.segments = [Segment("prompt", tuple(ids[:begins]))]
    for owner, run in groupby(range(begins, len(ids)), key=owners.__getitem__):
        whole = [*run]
        tokens = tuple(ids[place] for place in whole)
        if owner < 0:
            chat.segments.append(Segment("environment", tokens))
        else:
            drawn = calls[owner].drawn
            at = slice(places[whole[0]][1], places[whole[-1]][1] + 1)
            floats = drawn.log_probs[at], drawn.sampling_log_probs[at]
            chat.segments.append(Segment("policy", tokens, *floats, versions=drawn.versions[at]))
    chat.finish_reason = (
        calls[last].finish_reason if (last := max(owners, default=-1)) >= 0 else "stop"
    )


def _num_continued(prompt: list[int], calls: Sequence[_Call]) -> int:
    """How many tokens of a prompt are those of an earlier request and its whole response."""
    wholes = [[*call.prompt, *call.drawn.token_ids] for call in calls]
    return max((len(whole) for whole in wholes if prompt[: len(whole)] == whole), default=0)


def _num_same(ids: list[int], call: _Call) -> int:
    """How many drawn tokens of a call the trajectory has, directly after the call's prompt."""
    start = len(call.prompt)
    return (
        sum(takewhile(bool, map(eq, ids[start:], call.drawn.token_ids)))
        if ids[:start] == call.prompt
        else 0
    )
