"""Common code of engines behind an HTTP server for token ids: answers are checked before use, and
weights are passed as files. A `Fleet` restarts lost servers and sends their requests again."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.data.sample import Segment
from distflow.errors import TrustError, UserError
from distflow.models.lora import plain_name, unwrapped
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_weights import checked, stripe_hashes
from distflow.rollout.servers.answer_checks import Answer, AnswerCheck, label_of, lie
from distflow.rollout.servers.server_process import PrivateFolder, ServerProcess, WeightFiles
from distflow.rollout.stops import check_request
from distflow.scheduling.group_states import Version

T = TypeVar("T")

LOG: Final = "server.log"
ATTACH_S: Final = 30.0
START_S: Final = 900.0  # loading a large model and capturing its graphs
CALL_S: Final = 600.0  # of a call that moves weights
SILENT_S: Final = 10.0
STUCK_S: Final = 600.0  # without a new token, of a server that answers everything else
LOOKS_EVERY_S: Final = 1.0
MOST_TRIES: Final = 3  # over new connections to a server that is well
RETRIES: Final = 4  # after a server error
BACK_OFF_S: Final = 0.25  # doubled on each retry
_CONNECT_S: Final = 10.0
# for responses: `_watch` detects a hung server
UNLIMITED: Final = httpx.Timeout(None, connect=_CONNECT_S)
_START_LOOKS_EVERY_S: Final = 0.2
_AT_SOCKET: Final = "http://server"
_NO_LIMITS: Final = httpx.Limits(
    max_connections=None, max_keepalive_connections=64, keepalive_expiry=1.0
)
MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors that reading an answer of another form raises."""


class ServerFailed(RuntimeError):
    """A server does not start, or fails a request."""


class ServerLost(ServerFailed):
    """A server has died or hangs, and its requests are lost."""


@dataclass(eq=False)
class HttpEngine(AbstractAsyncContextManager["HttpEngine"], ABC):
    """One server of a `Fleet`; subclasses implement the server's interface."""

    model: nn.Module
    """Only its config and the names and shapes of its weights matter."""
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    version: Version
    shares_weights: bool = False
    url: str | None = None
    """Of a running server; None starts one."""
    python: str | None = None
    """The interpreter of the environment that has the server; None for this one."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the server, by its own names."""
    kv_on_update: str = "recompute"
    max_num_seqs: int = 256
    free_cache_engine: bool = False
    """`pause(release=True)` also frees the weights."""
    longest: int = 0
    """The most tokens of a prompt with its response."""
    num_generated_tokens: int = field(default=0, init=False)

    NAME = "server"
    is_shared = False
    """Whether other workers use the same server, which is then watched even while this one has no
    requests."""

    def __post_init__(self) -> None:
        assert not self.shares_weights, "a server has memory of its own"
        self.config: Any = self.model.config
        self._running = set[asyncio.Task[Any]]()
        self._tokens_of_earlier = 0  # of earlier servers
        self._progress: object = None  # changes while the server generates; None: it does not say
        self._newest = self.version  # that the server may have received
        self._held: WeightFiles | None = None  # its weights
        self._process: ServerProcess | None = None
        self.number_of_server = 0
        self._silent_server = -1
        self._paused = False
        self._is_released = False
        self._moved = time.monotonic()

        # for our own server, at its socket
        self.own_url = _AT_SOCKET
        self.headers = dict[str, str]()
        self.max_positions = int(getattr(self.config, "max_position_embeddings", 0)) or 2**31
        self.longest = min(self.longest, self.max_positions)

    # What a subclass implements.

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError for options that cannot work on this machine."""

    @abstractmethod
    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command that starts a server, and its environment variables; it listens at
        `self.socket`."""

    @abstractmethod
    async def begin(self) -> None:
        """Query what a server runs. Raises UserError if it is not usable, httpx.TransportError
        while it is not up."""

    @abstractmethod
    async def ask(self, request: GenerateRequest) -> list[Answer]:
        """Generate the samples of a request, in order. A cancelled request is aborted on the
        server."""

    @abstractmethod
    async def halt(self) -> None:
        """Stop between two decode steps; requests stay open. Idempotent."""

    @abstractmethod
    async def halt_for_update(self) -> None:
        """Halt for new weights; running requests are to continue as `kv_on_update` says."""

    @abstractmethod
    async def drop_cache(self) -> None:
        """Drop keys and values of finished prompts while halted."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the memory of a halted server; `wake` comes before new weights."""

    @abstractmethod
    async def wake(self) -> None: ...

    @abstractmethod
    async def go_on(self) -> None: ...

    @abstractmethod
    async def take(self, files: WeightFiles) -> Mapping[str, str]:
        """Load weights while halted; returns the hash of each tensor that the server has then."""

    @abstractmethod
    async def held_hashes(self) -> Mapping[str, str]: ...

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Label the loaded weights with this version."""

    @abstractmethod
    async def count_tokens(self) -> int:
        """The number of tokens generated by this server; asks its computing process, and sets
        `_progress`."""

    # What a fleet asks.

    async def __aenter__(self) -> "HttpEngine":
        self.folder = PrivateFolder("distflow-server-")
        self.socket = self.folder.path / "socket"

        at_socket = (self.url or self.own_url) == _AT_SOCKET
        transport = None
        if at_socket:
            transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=_NO_LIMITS)

        self.client = httpx.AsyncClient(
            base_url=self.url or self.own_url,
            headers=self.headers,
            transport=transport,
            limits=_NO_LIMITS,
            timeout=httpx.Timeout(CALL_S, connect=_CONNECT_S),
            trust_env=False,
        )

        async with AsyncExitStack() as if_it_fails:  # Python does not call `__aexit__` then
            if_it_fails.push_async_exit(self.__aexit__)
            await self._start()
            if_it_fails.pop_all()

        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in list(self._running):
            task.cancel()
        if self._process is not None:
            self._process.kill()
        self.folder.remove()
        await self.client.aclose()

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Generate all requested samples; cancelling aborts them. Raises UserError for an
        impossible request, TrustError for an invalid answer."""
        vocab_size = self.config.vocab_size
        check_request(
            request.prompt_ids, request.samples, request.params, vocab_size, self.max_positions
        )
        first = self.version
        self._moved = time.monotonic()
        return await self.call(partial(self._generations, request, first))

    async def pause(self, release: bool = False) -> None:
        """See `RolloutEngine`. release: drops cached keys and values; the server's class decides
        what else."""
        self._paused = True
        await self.call(self._release if release else self.halt)
        await self.call(self._count)

    async def resume(self) -> None:
        self._paused = False
        if not self._is_released:
            await self.call(self.go_on)

    async def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return dict(await self.call(self.held_hashes))

    def write(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        """Write weights into a folder of files, which `drop` removes. Raises ValueError if they do
        not fit the model."""
        own = self.parameters()
        hashes = dict[str, str]()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in checked(own, weights):
                hashes.update(stripe_hashes([(name, tensor)]))
                yield name, tensor

        num_bytes = sum(each.nbytes for each in own.values())
        return WeightFiles(version, self.folder.save(noted(), num_bytes), hashes)

    def drop(self, files: WeightFiles) -> None:
        self.folder.drop(files.folder)

    async def load(self, files: WeightFiles) -> None:
        """Have the server load weights. Generation is halted only while it reads complete files. If
        it has them already, only the version changes."""
        self._moved = time.monotonic()
        if self._held is not None and self._held.folder == files.folder:
            await self.rename(files.version)
        else:
            await self.call(partial(self._update, files))
        self._moved = time.monotonic()

    async def rename(self, version: Version) -> None:
        """Give the server's weights another version."""
        self._newest = version  # responses that end meanwhile may have either version
        await self.call(partial(self.set_label, label_of(version)))
        self.version = version

    async def restart(self) -> None:
        """Start another server, without weights; for a given url, attach to whatever runs there
        now."""
        self.number_of_server += 1
        self._held = None
        self._is_released &= self.url is not None  # our own server was restarted
        self._tokens_of_earlier = self.num_generated_tokens
        if self._process is not None:
            self._process.kill()
        await self._start()

    def abandon(self) -> None:
        """Treat the server as lost, along with its requests."""
        self._silent_server = self.number_of_server
        for task in list(self._running):
            task.cancel()

    async def is_hanging(self) -> bool:
        """Whether requests wait for a server that neither answers nor computes, or that answers but
        generates nothing."""
        if not (self._running or self.is_shared):
            return False

        ticks = self._cpu_ticks()

        # of a server that this process has not started, nobody sees whether it computes
        limit_s = SILENT_S if self._process is not None else ATTACH_S
        try:
            async with asyncio.timeout(limit_s):
                await self._hear()
        except TimeoutError:
            return self._cpu_ticks() == ticks

        is_waiting = self._progress is not None and bool(self._running)
        return is_waiting and time.monotonic() - self._moved > STUCK_S

    # Requests.

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: httpx.Timeout | None = None,
        **params: str,
    ) -> Any:
        """The server's answer, with retries after server errors. timeout: None for the client's.
        Raises ServerFailed, TrustError for an answer that is not JSON, httpx.TransportError."""
        for number in range(RETRIES):
            answer = await self.client.post(
                path, json=body, params=params, timeout=timeout or self.client.timeout
            )
            if answer.status_code < 500:
                break
            await asyncio.sleep(BACK_OFF_S * 2**number)

        if (
            answer.status_code >= 500
            and (await self.client.get("/health")).status_code != httpx.codes.OK
        ):
            raise httpx.RemoteProtocolError(
                f"it answered {path} with {answer.status_code}, and is not well"
            )
        if answer.status_code != httpx.codes.OK:
            raise ServerFailed(
                f"{self.who} answered {path} with {answer.status_code}: {answer.text[:500]}"
            )

        return self.read(answer)

    def read(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise lie(self.who, f"no JSON, but {answer.text[:80]!r}") from None

    @property
    def who(self) -> str:
        return f"the {self.NAME}" + (f" at {self.url}" if self.url else "")

    async def _answers(self, request: GenerateRequest) -> list[Answer]:
        return await self.ask(request)

    async def _generations(self, request: GenerateRequest, first: Version) -> tuple[Segment, ...]:
        """The checked answers. first: the version at the start of the request."""
        answers = await self._answers(request)
        if len(answers) != len(request.samples):
            raise lie(
                self.who, f"{len(answers)} responses where {len(request.samples)} were asked for"
            )

        last = max(self.version, self._newest)
        check = AnswerCheck(self.who, self.tokenizer, self.config.vocab_size, first, last)
        given = zip(request.samples, answers, strict=True)
        return tuple(check.segment(sample, request.params, answer) for sample, answer in given)

    async def _reading(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`. Raises TrustError where it cannot read an answer."""
        try:
            return await work()
        except MALFORMED as err:
            if isinstance(err, UserError):
                raise
            what = f"{type(err).__name__}: {err}"[:300]
            raise lie(self.who, f"in a form that its interface does not define ({what})") from err

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work`, again if only its connection was lost. Raises ServerLost if the server is."""
        why = ""
        for _ in range(MOST_TRIES):
            server = self.number_of_server
            task = asyncio.create_task(self._reading(work))
            self._running.add(task)

            try:
                return await task
            except httpx.TransportError as err:
                why = f"{type(err).__name__} {err}".strip()
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if server != self._silent_server or (caller is not None and caller.cancelling()):
                    raise
                why = "it did not respond"
            finally:
                self._running.discard(task)

            is_same = server == self.number_of_server != self._silent_server
            if not (is_same and await self._is_well()):
                break

        raise ServerLost(f"{self.who} is lost ({why}){self._log_end()}")

    # The server.

    async def _is_well(self) -> bool:
        """Whether only a connection was lost: an idle one that the server closed, or one to a
        predecessor."""
        try:
            return (
                await self.client.get("/health", timeout=SILENT_S)
            ).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def _start(self) -> None:
        """Start a server or attach to a running one."""
        if self.url is None:
            self.socket.unlink(missing_ok=True)
            command, env = self.command(self.folder.path)
            self._process = ServerProcess(command, env, self.folder.path / LOG)

        due = time.monotonic() + (START_S if self._process is not None else ATTACH_S)
        while True:
            try:
                await self._reading(self.begin)
                break
            except httpx.TransportError as err:
                self._check_starting(err, due)
            await asyncio.sleep(_START_LOOKS_EVERY_S)

        if self.longest > self.max_positions:
            raise UserError(
                f"{self.who} has a context of {self.max_positions} tokens, but "
                f"data.max_prompt_length and data.max_response_length make {self.longest}: lower "
                "them, or start the server with a longer context"
            )

        self._moved = time.monotonic()

    def _check_starting(self, err: httpx.TransportError, due: float) -> None:
        if self._process is not None and not self._process.is_running():
            options = "check actor_rollout_ref.rollout.engine_kwargs and the model's size"
            raise ServerFailed(
                f"{self.who} ended before it was ready: {options}{self._log_end()}"
            ) from err
        if time.monotonic() > due:
            if self.url is not None:
                raise UserError(
                    f"actor_rollout_ref.rollout.url={self.url}: no server answers there ({err})"
                ) from err

            raise ServerFailed(
                f"{self.who} was not ready within {START_S:g} s{self._log_end()}"
            ) from err

    def _log_end(self) -> str:
        if self._process is not None:
            return f". The end of its log:\n{self._process.last_lines()}"
        return ""

    def _cpu_ticks(self) -> int:
        if self._process is not None:
            return self._process.cpu_ticks()
        return 0

    async def _hear(self) -> None:
        """Wait until the server answers at all."""
        while True:
            try:
                return await self._count()
            except httpx.TransportError:  # if the machine is gone, open requests get no error
                await asyncio.sleep(LOOKS_EVERY_S)
            except (httpx.HTTPError, TrustError, ServerFailed, *MALFORMED):
                return None  # only a missing answer counts here

    async def _count(self) -> None:
        before = (self.num_generated_tokens, self._progress)
        earlier = self._tokens_of_earlier
        self.num_generated_tokens = earlier + await self.count_tokens()
        if self._paused or (self.num_generated_tokens, self._progress) != before:
            self._moved = time.monotonic()

    # Weights.

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of the model, by the names under which a trainer sends them."""
        named = unwrapped(self.model).named_parameters(remove_duplicate=False)
        return {plain_name(name): parameter for name, parameter in named}

    async def _update(self, files: WeightFiles) -> None:
        await self.halt_for_update()
        if self._is_released:
            await self.wake()
            self._is_released = False

        hashes = await self.take(files)
        if hashes != files.hashes:
            raise lie(self.who, "with hashes of weights other than those that were sent")

        await self.set_label(label_of(files.version))

        # before its first token
        self.version = files.version
        self._held = files
        if not self._paused:
            await self.go_on()

    async def _release(self) -> None:
        await self.drop_cache()
        if self.free_cache_engine:
            await self.sleep()
            self._is_released = True


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. If one fails, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task; raises its exception if it had failed before."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
