"""The conversation of one agent with the policy: append-only token segments, in which each turn's
prompt is the exact ids of everything before it. It forks if history is rewritten, or several
conversations continue from one point. An episode of several agents has a conversation for each, and
the workflow awaits any of them."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeGuard

from distflow.data.sample import Owner, Segment, note_event
from distflow.environments.parse_tool_calls import opens_thought
from distflow.errors import UserError, hint
from distflow.user_values import finite_number

if TYPE_CHECKING:  # it imports torch, which the processes of tools and environments should not
    from distflow.environments.tokens_between_turns import TurnTokens

Message = Mapping[str, Any]
Content = str | Message | Sequence[Message] | Sequence[int]
Generate = Callable[..., Awaitable[Segment]]
"""(prompt ids, max_tokens, stop strings and tokens, number of tokens drawn before, images=paths) →
the tokens that the policy drew, with the reason why it stopped."""
THOUGHT_TOKENS = 16
"""At the end of a prompt, which contain the beginning of the thinking."""

AGENTS_KEY = "actor_rollout_ref.rollout.agents"


class ChatError(UserError):
    """A workflow requests something that its chat cannot do."""


class TemplatedTwice(ChatError):
    """A message that has gone through a chat template would go through it again."""


class Prompt(str):
    """The prompt of a row: its text without a chat template."""

    token_ids: tuple[int, ...]
    """Of the data set."""
    messages: tuple[Message, ...]
    """Of a chat; empty if the row has a text."""

    def __new__(
        cls, text: str, token_ids: Sequence[int], messages: Sequence[Message] = ()
    ) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.token_ids = tuple(token_ids)
        prompt.messages = tuple(messages)
        return prompt

    @property
    def as_messages(self) -> list[dict[str, Any]]:
        """Those of a chat, or the text as one of the user."""
        return [dict(message) for message in self.messages or [_user(str(self))]]


@dataclass(frozen=True)
class Reply:
    """The policy's reply in one turn. A reply for which there was no room has no tokens."""

    text: str
    """Without special tokens."""
    token_ids: tuple[int, ...]
    """Including the one that ended it."""
    finish_reason: str
    """stop; length if it was truncated, or the response had no room left; context if the
    context had no room."""

    @property
    def message(self) -> dict[str, str]:
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True)
class Limits:
    """Limits in tokens."""

    response: int
    """Everything after the first prompt, also what the policy did not draw."""
    context: int
    """The same with that prompt."""


@dataclass(eq=False)
class Chat:
    """One agent's conversation. A workflow may read all fields, and calls `ask` and `fork`."""

    tokens: "TurnTokens"
    generate: Generate
    limits: Limits
    templated: bool
    """Whether text becomes messages of the tokenizer's chat template; otherwise its tokens are
    appended directly."""
    segments: list[Segment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The history so far."""
    tools: Sequence[Message] = ()
    """Schemas, of the first turn."""
    turns: int = 0
    """Number of calls of `ask`."""
    finish_reason: str = "stop"
    """Of the last reply. A workflow may set another one, which the sample then has."""
    last: Reply | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """By the name of a metric, which sums them over episodes."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How the policy draws; empty in validation."""
    version: int = 0
    """Of the weights at the start."""
    clock_stopped: Callable[..., AbstractContextManager[object]] = nullcontext
    """Inside, time does not count for the episode's deadline, for waits with deadlines of their
    own. Its argument names what is waited for; without one it is the environment."""
    forked: Callable[["Chat"], None] = lambda fork: None
    """Called with each fork."""
    name: str = ""
    """Empty for the episode's first conversation, else the numbers of the forks that lead to this
    one, such as 2.1."""
    agent: str = ""
    """The conversation's agent, if the episode has several."""
    max_tokens: int | None = None
    """Of each of its replies, besides the limit of a call."""
    stop: tuple[str, ...] = ()
    """Strings that end each of its replies, besides those of a call."""
    image_store: Path = Path()
    """The folder of the images that it shows."""
    head: Mapping[str, Any] | None = None
    """The name and the fields of a head (`models/number_head.py`), which draws the replies as
    numbers, whose values the last segment then has."""
    conversations: list["Chat"] = field(default_factory=list, repr=False)
    """All of the episode, including this one; the one with the last reply is the last."""
    waiting: bool = field(default=False, init=False)
    """Whether it waits for a reply."""
    drawn_at: int = field(default=0, init=False)
    """The place in time of its last reply that has tokens."""
    _num_forks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.conversations.insert(-1, self)  # before the one with the last reply

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def num_drawn(self) -> int:
        """The number of tokens that the policy drew."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.owner == "policy")

    @property
    def response_left(self) -> int:
        """Tokens that still fit into the response."""
        return self.limits.response - sum(len(segment.token_ids) for segment in self.segments[1:])

    @property
    def context_left(self) -> int:
        """Tokens that still fit into the context."""
        return self.limits.context - sum(len(segment.token_ids) for segment in self.segments)

    async def ask(
        self,
        content: Content,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        tools: Sequence[Message] = (),
        images: Sequence[str] = (),
    ) -> Reply:
        """Send content, and return the policy's reply.

        content: text, a message, several messages, token ids, or a row's prompt. stop: strings that
        end the reply, besides those of the config. max_tokens: of the reply. tools: schemas, which
        the chat template shows the model from the first turn on. images: paths of those of a first
        prompt, given as token ids with their placeholders. Raises ChatError for invalid content.
        """
        if images and (self.segments or not _are_ids(content)):
            raise ChatError("ask: pass images with token ids, in the first turn of a conversation")
        if self.waiting:
            raise ChatError(
                "ask: this chat is still waiting for a reply: await one before the next"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ChatError(f"ask: max_tokens={max_tokens}: pass at least 1")

        said = content if isinstance(content, str) else deepcopy(content)  # its owner may change it
        given, messages = self._encoded(content, tools)
        room, limit = self._room_after(given)
        self.turns += 1
        if room < 1:
            await asyncio.sleep(0)  # so that a workflow that asks forever reaches its deadline
            return self._replied(Reply("", (), limit))

        most = min(room, max_tokens or room, self.max_tokens or room)
        turn = self._next_turn()
        drawn = await self._drawn(given, most, stop, images)
        reason = drawn.finish_reason or "stop"

        if given:
            owner = self._owner_of(messages[0])
            self.segments.append(Segment(owner, given, images=tuple(images)))

        self.segments.append(replace(drawn, turn=turn))
        self.drawn_at = 1 + max(each.drawn_at for each in self.conversations)
        note_event("turn", self.name, said, drawn.token_ids)
        reply = Reply(self.tokens.decode(drawn.token_ids), drawn.token_ids, reason)
        self.messages += [*messages, reply.message]
        self._replied(reply)

        if reason == "length" and most < room:
            # by the workflow's own max_tokens, which does not truncate the episode
            self.finish_reason = "stop"

        return reply

    async def _drawn(
        self, given: Sequence[int], most: int, stop: Sequence[str], images: Sequence[str]
    ) -> Segment:
        seen = {"images": tuple(images)} if images else {}
        prompt = (*self.token_ids, *given)
        self.waiting = True

        try:
            return await self.generate(prompt, most, (*self.stop, *stop), self.num_drawn, **seen)
        finally:
            self.waiting = False

    def _room_after(self, given: Sequence[int]) -> tuple[int, str]:
        """How many tokens of a reply to these fit, and the finish reason of one that does not.
        Raises ChatError for a first prompt that fills the context."""
        response_room = self.response_left
        if self.segments:
            response_room -= len(given)
        elif len(given) >= self.limits.context:
            raise ChatError(
                f"the context is full before the first token: the first prompt has {len(given)} "
                f"tokens, and the context {self.limits.context} (data.max_prompt_length and "
                "data.max_response_length)"
            )

        limit = "length" if response_room < 1 else "context"
        return min(response_room, self.context_left - len(given)), limit

    def _next_turn(self) -> int:
        """The number of the next reply, counted from 1 over all conversations of the episode."""
        last = 0
        for each in self.conversations:
            for segment in each.segments:
                last = max(last, segment.turn)
        return last + 1

    def _owner_of(self, first_message: Message) -> Owner:
        if not self.segments:
            return "prompt"
        if first_message.get("role") == "tool":
            return "tool"
        return "environment"

    def opened_thought(self, reply: Reply) -> bool:
        """Whether the prompt of the last reply has opened the thinking."""
        before = self.token_ids[: len(self.token_ids) - len(reply.token_ids)]
        return opens_thought(self.tokens.written(before[-THOUGHT_TOKENS:]))

    def reward(self, value: float) -> None:
        """Assign this much of the episode's score to the last reply, in addition to earlier
        assignments. The rest of the score goes to the last turn. Raises ChatError."""
        try:
            value = finite_number(value, "it is")
        except ValueError as error:
            raise ChatError(f"reward: pass a finite number: {error}") from None

        note_event("paid", self.name, value)
        places = [place for place, segment in enumerate(self.segments) if segment.owner == "policy"]
        if not places:
            raise ChatError("reward: there is no reply yet: await chat.ask first")
        last = self.segments[places[-1]]
        self.segments[places[-1]] = replace(last, reward=last.reward + value)

    def keep(self, number: int) -> None:
        """Of the last reply only the first `number` tokens had an effect: the rest is not trained
        on."""
        note_event("kept", self.name, number)
        last = self.segments.pop()
        assert last.owner == "policy", "the last segment is a reply"
        self.segments.append(last.part(slice(number)))
        unused = last.token_ids[number:]
        if unused:
            self.segments.append(Segment("unused", unused))

    def fork(self, messages: Sequence[Message] | None = None) -> "Chat":
        """A further, separate conversation of the episode; several may ask at the same time.

        It continues from here with the same tokens, all of which count as given. messages: replace
        them as its history, e.g. by a summary, which the chat template renders at the start of its
        first prompt; () begins anew.
        Raises ChatError for anything that is not a message.
        """
        begun = list[Segment]()
        if messages is None:
            history = list(self.messages)
            if self.segments:
                begun.append(Segment("prompt", self.token_ids))
        else:
            history = _messages(messages, "fork") if messages != () else []

        self._num_forks += 1
        name = f"{self.name}.{self._num_forks}".removeprefix(".")
        fork = replace(
            self,
            name=name,
            segments=begun,
            messages=history,
            turns=0,
            last=None,
            finish_reason="stop",
        )
        self.forked(fork)

        return fork

    def check_contents(self, messages: Sequence[Message]) -> None:
        """Raises TemplatedTwice for messages to which a chat template has been applied already."""
        fault = self.tokens.control_word(messages, self._is_drawn)
        if fault:
            raise TemplatedTwice(fault)

    def _is_drawn(self, text: str) -> bool:
        """Whether the policy has written this in the episode, or an assistant in the history."""
        for each in self.conversations:
            for segment in each.segments:
                if segment.owner == "policy" and text in self.tokens.written(segment.token_ids):
                    return True

        for message in self.messages:
            if message.get("role") == "assistant" and text in str(message.get("content")):
                return True

        return False

    def _replied(self, reply: Reply) -> Reply:
        self.last = reply
        self.finish_reason = reply.finish_reason
        self.conversations.remove(self)
        self.conversations.append(self)
        return reply

    def _encoded(
        self, content: Content, tools: Sequence[Message]
    ) -> tuple[tuple[int, ...], list[Message]]:
        """The token ids to append, and the messages that they represent."""
        begins = not self.segments
        history = self.messages if begins else []  # of a fork with its own messages

        if tools and not (begins and self.templated):
            raise ChatError(
                "ask: pass tools in the first turn, with a chat template: set "
                "data.prompt_format=chat"
            )

        if isinstance(content, Prompt) and (tools or history):
            content = content.messages or str(content)
        if isinstance(content, Prompt) and begins:
            return content.token_ids, list[Message](content.as_messages)
        if _are_ids(content):
            if history:
                raise ChatError(
                    "ask: token ids cannot follow the messages of a fork or a system prompt: ask "
                    "with a text or messages first"
                )
            return tuple(content), [_user(self.tokens.decode(content))]
        if isinstance(content, str) and not self.templated:
            text = "".join(str(message.get("content", "")) for message in history) + content
            return self.tokens.of_text(text, begins=begins), [_user(content)]

        said = [_user(content)] if isinstance(content, str) else _messages(content)

        self.check_contents([*history, *said])
        if begins:
            self.tools = tools or self.tools
            return self.tokens.opening([*history, *said], self.tools), said

        return self.tokens.between(said, self.segments[-1].token_ids[-1], self.tools), said


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _are_ids(content: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return False
    return bool(content) and all(type(token) is int for token in content)


def _messages(content: object, by: str = "ask") -> list[Message]:
    """Content as messages. by: the method whose argument it is. Raises ChatError for anything
    else."""
    said = list[Any]()
    if isinstance(content, Mapping):
        said = [content]
    elif isinstance(content, list | tuple):
        said = list(content)

    if said and all(isinstance(message, Mapping) and "role" in message for message in said):
        return said

    raise ChatError(
        f"{by}({content!r:.80}): pass a message with 'role' and 'content', or several; ask also "
        "takes a text, and token ids"
    )


class Agent(Protocol):
    """An agent as declared in the config."""

    @property
    def system_prompt(self) -> str: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def stop(self) -> tuple[str, ...]: ...


class Agents(dict[str, Chat]):
    """The agents' chats by name, in the order of the config. Raises ChatError for an unknown
    name."""

    def __missing__(self, name: object) -> NoReturn:
        raise ChatError(
            f"agents[{name!r}]: {AGENTS_KEY} has no agent of that name{hint(str(name), self)}"
        )


def begin_agents(chat: Chat, agents: Mapping[str, Agent]) -> Agents:
    """The chats of an episode's agents. chat: its first conversation, which becomes that of the
    first agent."""
    chats = Agents()
    for name, settings in agents.items():
        own = chat
        if chats:
            own = replace(chat, name=name, segments=[], messages=[])
        own.agent = name
        own.max_tokens = settings.max_tokens
        own.stop = settings.stop
        own.messages = []
        if settings.system_prompt:
            own.messages.append({"role": "system", "content": settings.system_prompt})
        own.forked(own)
        chats[name] = own

    return chats
