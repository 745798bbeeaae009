"""The protocol of rollout engines, tokens in, tokens out, and the log of their activity."""

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

from torch import Tensor

from distflow.data.sample import Segment
from distflow.models.number_head import NumberHead
from distflow.scheduling.group_states import TRAIN, Version

if TYPE_CHECKING:
    from distflow.models.row_adapters import RowAdapter

_LONGEST_LOG: Final = 10_000  # unless it is read

KVOnUpdate = Literal["keep", "recompute", "abort"]
"""Effect of new weights on begun sequences: continue with the old keys and values, recompute these,
or end."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. The policy is softmax(logits / temperature); truncations and penalties
    apply after it."""

    max_tokens: int
    """The most tokens of one response."""
    temperature: float = 1.0
    top_p: float = 1.0
    """1.0 is off."""
    top_k: int = -1
    """-1 is off."""
    min_p: float = 0.0
    """0.0 is off."""
    repetition_penalty: float = 1.0
    """1.0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they are kept in its tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, such as the model's end of a sequence; they are kept too."""
    num_top: int = 0
    """Record so many of the likeliest tokens at each draw."""
    greedy: bool = False
    """Take the most likely token; log-probs are still those at `temperature`."""
    head: NumberHead | None = None
    """Draws numbers instead of tokens."""


@dataclass(frozen=True)
class Stream:
    """The random stream of a group. Stream, sample index and number of tokens drawn so far
    determine every draw."""

    seed: int
    name: str
    epoch: int
    row: int

    def fork(self, name: str) -> "Stream":
        """The stream of a further conversation of each episode; of the first one if the name is
        empty."""
        if name:
            return replace(self, name=f"{self.name}/fork {name}")
        return self


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt with the requested sample indices, e.g. `samples=(0, 1, 2, 3)` for a whole group
    of four."""

    prompt_ids: tuple[int, ...]
    samples: tuple[int, ...]
    params: SamplingParams
    stream: Stream
    num_drawn: int = 0
    """Tokens that the policy drew in earlier turns of the episode. The random stream continues
    after them."""
    may_continue: bool = False
    """Later prompts may begin with this prompt and its response, so an engine may keep their keys
    and values until its weights change."""
    policy: str = ""
    """The one that draws, if an engine serves several."""
    images: tuple[str, ...] = ()
    """Of the prompt, see `data/images.py`."""
    adapter: "RowAdapter | None" = None
    """Added to the weights, by `embedded` and `hf` over a module of `make_row_adaptable`."""


async def generate_whole(
    ask: Callable[[GenerateRequest], Awaitable[tuple[Segment, ...]]], request: GenerateRequest
) -> tuple[Segment, ...]:
    """The responses of `ask`, an engine's `generate`, after samples aborted by a weight update were
    generated again."""
    responses = await ask(request)
    while aborted := tuple(each.sample for each in responses if each.finish_reason == "abort"):
        again = await ask(replace(request, samples=aborted))
        redone = {each.sample: each for each in again}
        responses = tuple(redone.get(each.sample, each) for each in responses)
    return responses


@dataclass(frozen=True)
class WeightReceipt:
    """What an engine holds after a weight update."""

    version: Version
    hashes: dict[str, str] = field(default_factory=dict)
    """The hash of a stripe of each tensor."""
    shared: bool = False
    """The engine computes on the trainer's storage, so nothing was copied."""
    version_only: bool = False
    """No weights were sent, only a new version for those it has; then there are no hashes."""


Stretch = Callable[[Callable[[], bool]], None]
"""Computes until there is nothing left to do, or its argument returns that the thread is needed
elsewhere."""


class Host(Protocol):
    """Lends a thread that would otherwise wait."""

    @property
    def waits(self) -> bool:
        """Whether it has a thread to lend."""
        ...

    def compute(self, stretch: Stretch) -> bool:
        """Have the lent thread compute a stretch, and return when it is done; False if there is no
        thread to lend."""
        ...


@runtime_checkable
class Hosted(Protocol):
    """An engine that computes on a host's thread, if a host is set before it is entered; while the
    host has none to lend, it uses its own thread."""

    host: Host | None


class RolloutEngine(Protocol):
    """Generates token ids. As an async context manager, it starts on entry, and ends its threads
    and processes on exit.

    An engine that counts its tokens in `num_generated_tokens` shows that a long request makes
    progress; without it an engine must complete some request within
    `actor_rollout_ref.rollout.timeout_s`. An engine with an activity log has `take_activity`; one
    whose draws depend on more than the request has `repeats_draws = False`.
    """

    @property
    def version(self) -> Version:
        """The version of the weights that it serves."""
        ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Generate all requested samples, one segment of the policy for each, in the order of the
        request; cancelling the task aborts them."""
        ...

    async def pause(self, release: bool = False) -> None:
        """Stop between two decode steps; running sequences stay. `release` also frees KV and the
        engine's own weights, which `load_weights` must restore before it decodes. A paused engine
        may be paused again."""
        ...

    async def resume(self) -> None:
        """Continue decoding."""
        ...

    async def hashes(self) -> dict[str, str]:
        """The hash of a stripe of each tensor that it computes with, as in a receipt, by Hugging
        Face name."""
        ...

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """Take new weights between two decode steps; drops cached KV of finished prompts.

        None: only the version changes. Weights and everything computed with them then count as of
        `version`.
        """
        ...


@dataclass(frozen=True)
class Activity:
    """A stretch in which one lane was decoded under one version without running empty."""

    t0: float
    """`time.time()`, as `t1`. A stretch that directly follows another (with a new version or lane)
    starts at its `t1`, so the time of a weight sync counts for the earlier one."""
    t1: float
    version: int
    """The step whose weights drew the `tokens`."""
    lane: str
    tokens: int


class ActivityLog:
    """The activities of an engine, written by the decoding thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[Activity] = deque(maxlen=_LONGEST_LOG)
        self._open: Activity | None = None

    def decoded(self, t0: float, t1: float, version: int, lane: str, tokens: int) -> None:
        """Record that a step drew these tokens; there was work since the last step, unless
        `stopped` was called."""
        with self._lock:
            last = self._open
            if last is not None and (last.version, last.lane) == (version, lane):
                self._open = replace(last, t1=t1, tokens=last.tokens + tokens)
                return

            if last is not None:
                self._end(replace(last, t1=t0))
                # an activity that was just read ends where this one begins
                t0 = t0 if last.tokens else last.t0

            self._open = Activity(t0, t1, version, lane, tokens)

    def stopped(self) -> None:
        """Record that nothing is decoded after the last step."""
        with self._lock:
            if self._open is not None:
                self._end(self._open)
            self._open = None

    def take(self) -> list[Activity]:
        """All activities since the last call; a stretch that continues is cut here."""
        with self._lock:
            if self._open is not None:
                self._end(self._open)
                self._open = replace(self._open, t0=self._open.t1, tokens=0)
            activities = list(self._ended)
            self._ended.clear()
            return activities

    def _end(self, activity: Activity) -> None:
        if activity.tokens > 0:  # else it has been read already
            self._ended.append(activity)


class RequestLog(ActivityLog):
    """The activity log of an engine that learns of tokens only with whole responses."""

    def __init__(self) -> None:
        super().__init__()
        self._num_busy = 0
        self._since = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Marks that a request is open."""
        if self._num_busy == 0:
            self._since = time.time()
        self._num_busy += 1

        try:
            yield
        finally:
            self._num_busy -= 1
            if self._num_busy == 0:
                self.stopped()

    def responded(self, request: GenerateRequest, responses: Sequence[Segment]) -> None:
        """A request is answered."""
        lane = "eval"
        if request.stream.name.partition("/")[0] == TRAIN:
            lane = TRAIN

        now = time.time()
        num_tokens = 0
        step = 0
        for each in responses:
            num_tokens += len(each.token_ids)
            step = max(step, *each.versions, 0)

        self.decoded(self._since, now, step, lane, num_tokens)
        self._since = now


def take_activity(engine: object) -> list[Activity]:
    """An engine's activity since the last call; empty for an engine without a log."""
    take = getattr(engine, "take_activity", None)
    return take() if take is not None else []


def server_metrics(engine: object) -> dict[str, float]:
    """Metrics of each server of an engine with several; empty for others."""
    found = getattr(engine, "server_metrics", None)
    return found() if found is not None else {}
