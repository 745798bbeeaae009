"""Sends the requests of a group's episodes to the engine, each turn at once or in rounds."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from distflow.data.sample import Segment
from distflow.environments.chat import Chat, ChatError
from distflow.models.number_head import make_head
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import deadline_paused

_SHARES_WITHIN_S = 0.01
"""How long a group's first request waits for those of its other episodes, with which it shares the
prefill."""

_NUM_TURNS = 8
"""How often user code gets a turn before a round without news is sent: a reply passes through tasks
to the next `ask`."""

_Asked = tuple[str, tuple[int, ...], SamplingParams, int, tuple[str, ...]]
"""Name of the conversation, prompt, parameters, tokens drawn before, images of the prompt."""
_Waiting = dict[int, asyncio.Future[Segment]]
"""Waiting requests by the index of the episode."""


@dataclass(eq=False)
class EpisodeRequests:
    """Sends the requests of a group's episodes to the engine; equal prompts share one, and so their
    prefill."""

    group: Group
    rollout: RolloutEngine
    in_rounds: bool
    """Whether requests are sent together, when every episode has asked or ended, so that decode
    batches do not depend on timing. A forked episode has asked when one of its conversations has,
    none waits for a reply, and no reward function scores it."""
    take_turn: Callable[[], Awaitable[None]]
    """Returns after what user code was about to do."""
    may_continue: bool
    """Whether an episode may have several turns."""
    policy_of: Callable[[str], str]
    """The policy of a conversation, by its name."""
    params_of: Callable[[str], SamplingParams]
    """The sampling of a conversation, by its name."""
    num_prompt_tokens: int = 0
    """Of all requests whose engine reports its cache."""
    num_cached_tokens: int = 0
    failure: Exception | None = None
    """What the engine raised."""
    _scoring: Counter[int] = field(default_factory=Counter)
    _asked: dict[_Asked, _Waiting] = field(default_factory=dict)
    _sent: dict[asyncio.Task[None], _Waiting] = field(default_factory=dict)
    _num_asked: int = 0
    _settling: asyncio.Task[None] | None = None
    _closed: bool = False

    def __post_init__(self) -> None:
        self._running = set(self.group.wanted)
        self._has_forked = False

    def connect(self, index: int, chat: Chat) -> None:
        """Connect this episode's chat, or a fork, to these requests."""
        self._has_forked |= bool(chat.name)
        chat.generate = partial(self.ask, index, chat)
        chat.forked = partial(self.connect, index)

    async def ask(
        self,
        index: int,
        chat: Chat,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop: tuple[str | int, ...],
        num_drawn: int,
        images: tuple[str, ...] = (),
    ) -> Segment:
        """See `distflow.environments.chat.Generate`. index: of the episode."""
        if index not in self._running:
            raise ChatError("ask: the episode of this chat has ended")

        fork = chat.name
        own = self.params_of(fork)
        texts = (*own.stop, *(text for text in stop if isinstance(text, str)))
        tokens = (*own.stop_token_ids, *(token for token in stop if isinstance(token, int)))
        params = replace(
            own,
            max_tokens=max_tokens,
            stop=tuple(dict.fromkeys(texts)),
            stop_token_ids=tuple(dict.fromkeys(tokens)),
        )
        if chat.head is not None:  # its tokens may be special ones
            params = replace(params, stop_token_ids=(), head=make_head(chat.head))
        future: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()

        with deadline_paused():
            waiting = self._asked.setdefault((fork, prompt, params, num_drawn, images), {})
            waiting[index] = future
            self._num_asked += 1
            self._look()

            if not self.in_rounds and (num_drawn or fork):
                self._send()
            elif not self.in_rounds:
                asyncio.get_running_loop().call_later(_SHARES_WITHIN_S, self._send)

            try:
                drawn = await future
            finally:
                waiting.pop(index, None)  # of a workflow that no longer waits
                self._withdraw()
                self._look()

        return drawn

    @contextmanager
    def scoring(self, index: int) -> Iterator[None]:
        """Inside, the episode waits for reward functions."""
        with deadline_paused():
            self._scoring[index] += 1
            try:
                yield
            finally:
                self._scoring[index] -= 1
                self._look()

    def ended(self, index: int) -> None:
        """End an episode's requests; pending ones are withdrawn."""
        self._running.discard(index)
        for waiting in (*self._asked.values(), *self._sent.values()):
            if index in waiting:
                waiting.pop(index).cancel()
        self._withdraw()
        self._look()

    def _withdraw(self) -> None:
        """Abort sent requests for which nobody waits."""
        for task, waiting in self._sent.items():
            if not waiting and not task.cancelling():  # a second time would cut its end short
                task.cancel()

    def close(self) -> None:
        """Withdraw sent requests, and send no more."""
        self._closed = True
        for task in (*self._sent, *([self._settling] if self._settling else ())):
            task.cancel()

    def _look(self) -> None:
        """Send the requests if all episodes have asked."""
        if self._closed or not self._all_asked():
            return
        if not (self._has_forked and self.in_rounds):
            self._send()
        elif self._settling is None:
            self._settling = asyncio.ensure_future(self._settle())

    def _all_asked(self) -> bool:
        asked = set[int]().union(*self._asked.values())
        if not asked >= self._running or not asked:
            return False
        if not self.in_rounds:
            return True
        if not all(self._sent.values()):  # aborted, but the engine may still decode
            return False

        busy = set[int]().union(*self._sent.values(), +self._scoring)

        return busy.isdisjoint(self._running)

    async def _settle(self) -> None:
        """Send once no further conversation is about to ask."""
        try:
            seen = -1
            while seen != self._num_asked:
                seen = self._num_asked
                for _ in range(_NUM_TURNS):
                    await self.take_turn()
        finally:
            self._settling = None

        if self._all_asked():
            self._send()

    def _send(self) -> None:
        if self._closed:
            asked = []
        else:
            asked = [item for item in self._asked.items() if item[1]]

        self._asked = {}
        in_order = sorted(asked, key=lambda item: (min(item[1]), item[0][0]))
        for (fork, prompt, params, num_drawn, images), waiting in in_order:
            stream = self.group.stream.fork(fork)
            samples = tuple(sorted(waiting))
            policy = self.policy_of(fork)
            request = GenerateRequest(
                prompt, samples, params, stream, num_drawn, self.may_continue, policy, images
            )
            task = asyncio.ensure_future(self._generate(request, waiting))
            self._sent[task] = waiting
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._sent[task]
        self._look()

    async def _generate(
        self, request: GenerateRequest, waiting: Mapping[int, "asyncio.Future[Segment]"]
    ) -> None:
        try:
            drawn = {each.sample: each for each in await self.rollout.generate(request)}
            for each in drawn.values():
                if each.num_cached_tokens is not None:
                    self.num_prompt_tokens += len(request.prompt_ids)
                    self.num_cached_tokens += each.num_cached_tokens

            for index, future in waiting.items():
                if not future.done():
                    future.set_result(drawn[index])
        except Exception as error:  # whatever it is, waiting episodes must end
            self.failure = error
        finally:
            for future in waiting.values():
                future.cancel()  # no effect if done
