"""Runs unmodified AReaL workflows: `arun_episode(engine, data)` requests responses in tokens from
an engine and returns the trajectory as tensors, whose tokens and mask must be what it drew."""

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
    """The `engine` of an episode. A request belongs to the row that it continues, else to the one
    with the fewest requests."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self.rows = [_Row(chat) for chat in chats]
        """The episode's samples."""

    def get_version(self) -> int:
        """The version of the newest weights that the episode has seen."""
        newest = self.rows[0].chat.version
        for row in self.rows:
            for call in row.calls:
                newest = max([newest, *call.drawn.versions])
        return newest

    async def agenerate(self, req: Any) -> ModelResponse:
        """req: has `input_ids` and a `gconfig`, of which `max_new_tokens`, `stop` and
        `stop_token_ids` apply. Raises ChatError if the rest differs from the run's sampling."""
        prompt = [int(token) for token in req.input_ids]
        gconfig = req.gconfig
        self._check_sampling(gconfig)
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

    def _check_sampling(self, gconfig: Any) -> None:
        for name, wanted in {**_FIXED, **self.rows[0].chat.sampling}.items():
            own = getattr(gconfig, name, wanted)
            if own == wanted or (name == "top_k" and _take_all_tokens(own, wanted)):
                continue
            raise ChatError(
                f"agenerate: gconfig.{name}={own!r}, and here it is {wanted!r}: the run's "
                "sampling is that of actor_rollout_ref.rollout, and each request is one response "
                "(rollout.n is the size of a group)"
            )


def _take_all_tokens(*top_k: int) -> bool:
    """Whether one of two numbers is AReaL's form of no limit, and the other is ours."""
    return max(top_k) >= 10**6 and min(top_k) < 1


async def _respond(
    chat: Chat, calls: list[_Call], prompt: list[int], gconfig: Any
) -> ModelResponse:
    num_prompt = len(prompt)
    for call in calls:
        if prompt[: len(call.prompt)] == call.prompt:
            num_prompt = min(num_prompt, len(call.prompt))
    response_room = chat.limits.response - (len(prompt) - num_prompt)
    room = min(response_room, chat.limits.context - len(prompt))
    if room < 1:
        await asyncio.sleep(0)  # so that a workflow that asks forever reaches its deadline
        return ModelResponse(list(prompt), [], [], [], "length")
    most = getattr(gconfig, "max_new_tokens", None) or room
    stop_texts = getattr(gconfig, "stop", None) or ()
    stop_tokens = getattr(gconfig, "stop_token_ids", None) or ()
    stop = (*stop_texts, *map(int, stop_tokens))
    num_drawn = sum(len(call.drawn.token_ids) for call in calls)
    drawn = await chat.generate(tuple(prompt), min(most, room), stop, num_drawn)
    finish_reason = drawn.finish_reason or "stop"
    if finish_reason == "length" and most < room:
        finish_reason = "stop"  # cut by the workflow's own limit, not the episode's
    calls.append(_Call(prompt, drawn, finish_reason))
    return ModelResponse(
        list(prompt),
        list(drawn.token_ids),
        list(drawn.rollout_log_probs),
        list(drawn.versions),
        "stop" if drawn.finish_reason == "stop" else "length",
    )


class ArealWorkflow:
    """A workflow that runs the `arun_episode`, or `run_episode`, of a user's object."""

    def __init__(self, theirs: Any) -> None:
        self._run = next(getattr(theirs, name) for name in METHODS if hasattr(theirs, name))
        gconfig = getattr(theirs, "gconfig", None)
        self.num_rows = max(1, int(getattr(gconfig, "n_samples", 1)))
        """The samples that each episode returns."""

    async def __call__(
        self, chats: Chat | list[Chat], row: Any
    ) -> float | list[float | None] | None:
        """chats: a list if episodes have several samples, one chat for each. row: a `Row`. Returns
        the reward, or None if it rejects the episode; of each chat in a list, None for those
        without a trajectory. Raises ValueError if a trajectory was not drawn by the engine."""
        has_several = isinstance(chats, list)
        engine = Engine(chats if isinstance(chats, list) else [chats])
        prompt = row.prompt
        messages = [dict(message) for message in prompt.messages]
        if not messages:
            messages = [{"role": "user", "content": str(prompt)}]
        engine.rows[0].chat.check_contents(messages)  # to which the object applies the template
        # as a str for rewards
        columns = {name: value for name, value in row.columns.items() if name != "prompt"}
        found = _rows(await self._run(engine, {**columns, "messages": messages}))
        if len(found) > len(engine.rows):
            raise ValueError(
                f"arun_episode returned {len(found)} rows, and its episodes are of "
                f"{len(engine.rows)}: that many is n_samples of the object's gconfig (1 without "
                "one)"
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
        return scores if has_several else scores[0]


def _rows(returned: Any) -> list[dict[str, Any]]:
    """The trajectories that a workflow returned, without padding: tensors with a row of each, or a
    list of such. Raises ValueError for anything else."""
    if returned is None:
        return []
    rows = list[dict[str, Any]]()
    if isinstance(returned, list | tuple):
        for each in returned:
            rows += _rows(each)
        return rows
    if not isinstance(returned, Mapping) or {"input_ids", "loss_mask", "rewards"} - {*returned}:
        raise ValueError(f"arun_episode returned {returned!r:.80}: return None, or {_NEEDED}")
    columns = {name: _values(returned[name]) for name in _COLUMNS if name in returned}
    rewards = _values(returned["rewards"])[0]
    if any(len(values) != len(rewards) for values in columns.values()):
        raise ValueError("arun_episode returned different numbers of rows in its tensors")
    for number, reward in enumerate(rewards):
        own = {name: values[number] for name, values in columns.items()}
        if len({len(values) for values in own.values()}) > 1:
            lengths = ", ".join(f"{len(values)} {name}" for name, values in own.items())
            raise ValueError(f"arun_episode returned rows of different lengths: {lengths}")
        shown = own.pop("attention_mask", [True] * len(own["input_ids"]))
        row: dict[str, Any] = {name: list(compress(v, shown)) for name, v in own.items()}
        row["rewards"] = reward
        rows.append(row)
    return rows


def _values(values: Any) -> list[list[Any]]:
    """The values of each row; a single row need not be in a list."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    rows = values if isinstance(values, list) else [values]
    if rows and isinstance(rows[0], list):
        return rows
    return [rows]


def _set_segments(chat: Chat, calls: Sequence[_Call], columns: Mapping[str, list[Any]]) -> None:
    """Store the trajectory as segments of the chat. Raises ValueError if the mask is on a token
    that was not drawn there."""
    ids = [int(token) for token in columns["input_ids"]]
    drawn_at = _drawn_at(ids, calls)
    owners = [-1] * len(ids)  # the call whose token is trained
    num_prompt = len(ids)
    for place in compress(range(len(ids)), columns["loss_mask"]):
        if place not in drawn_at:
            raise ValueError(
                f"arun_episode returned a loss_mask that is on for token {place} ({ids[place]}), "
                "which the engine did not draw after the tokens before it"
            )
        owners[place] = drawn_at[place][0]
        num_prompt = min(num_prompt, len(calls[owners[place]].prompt))
    if len(ids) - num_prompt > chat.limits.response or len(ids) > chat.limits.context:
        raise ValueError(
            f"arun_episode returned {len(ids)} tokens, {num_prompt} of them a prompt: more than "
            "the limits"
        )
    chat.segments = [Segment("prompt", tuple(ids[:num_prompt]))]
    for owner, run in groupby(range(num_prompt, len(ids)), key=owners.__getitem__):
        places = list(run)
        tokens = tuple(ids[place] for place in places)
        if owner < 0:
            chat.segments.append(Segment("environment", tokens))
            continue
        drawn = calls[owner].drawn
        _, begin = drawn_at[places[0]]
        part = slice(begin, begin + len(places))
        segment = Segment(
            "policy",
            tokens,
            drawn.rollout_log_probs[part],
            drawn.sampling_log_probs[part],
            versions=drawn.versions[part],
        )
        chat.segments.append(segment)
    last_call = max(owners, default=-1)
    chat.finish_reason = calls[last_call].finish_reason if last_call >= 0 else "stop"


def _drawn_at(ids: list[int], calls: Sequence[_Call]) -> dict[int, tuple[int, int]]:
    """For the place of each drawn token of the trajectory, the call that drew it and the token's
    position in the call. If several calls may have drawn a token, it is the one with most of the
    trajectory's tokens."""
    found = dict[int, tuple[int, int]]()
    num_same = [(_num_same(ids, call), number) for number, call in enumerate(calls)]
    for same, number in sorted(num_same, reverse=True):
        num_before = len(calls[number].prompt)
        for position in range(same):
            found.setdefault(num_before + position, (number, position))
    return found


def _num_continued(prompt: list[int], calls: Sequence[_Call]) -> int:
    """How many tokens of a prompt are those of an earlier request and its whole response."""
    longest = 0
    for call in calls:
        whole = [*call.prompt, *call.drawn.token_ids]
        if prompt[: len(whole)] == whole:
            longest = max(longest, len(whole))
    return longest


def _num_same(ids: list[int], call: _Call) -> int:
    """How many drawn tokens of a call the trajectory has, directly after the call's prompt."""
    start = len(call.prompt)
    if ids[:start] != call.prompt:
        return 0
    return sum(takewhile(bool, map(eq, ids[start:], call.drawn.token_ids)))
