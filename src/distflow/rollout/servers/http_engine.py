"""Common code of engines behind an HTTP server for token ids: requests are sent again if a server
dies or hangs, answers are checked before use, and weights are passed as files.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.data.sample import Segment
from distflow.errors import TrustError, UserError
from distflow.models.lora import plain_name, unwrapped
from distflow.rollout.engine import Activity, GenerateRequest, RequestLog, WeightReceipt
from distflow.rollout.engine_weights import check_version, checked
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
MOST_SERVERS: Final = 3  # tried for one request
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

_log = logging.getLogger(__name__)


class ServerFailed(RuntimeError):
    """A server does not start, or fails a request."""


class ServerLost(ServerFailed):
    """A server has died or hangs, and its requests are lost."""


@dataclass(eq=False)
class HttpEngine(AbstractAsyncContextManager["HttpEngine"], ABC):
    """A `RolloutEngine`; subclasses implement the server's interface.

    model: only its config and the names and shapes of its weights matter. url: of a running server;
    None starts one with `python`, the interpreter of the environment that has it (None for this
    one), and further options `engine_kwargs`, by the server's names. kv_on_update, max_num_seqs:
    the keys' values. free_cache_engine: `pause(release=True)` also frees the weights. longest: the
    most tokens of a prompt with its response. A server that dies is restarted with the current
    weights, and its requests are sent again.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    version: Version
    shares_weights: bool = False
    url: str | None = None
    python: str | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kv_on_update: str = "recompute"
    max_num_seqs: int = 256
    free_cache_engine: bool = False
    longest: int = 0
    num_generated_tokens: int = field(default=0, init=False)

    NAME = "server"
    in_fleet = False
    """Whether a fleet takes over the requests of a lost server, and calls `restart`."""
    is_shared = False
    """Whether other workers use the same server, which is then watched even while this one has no
    requests."""

    def __post_init__(self) -> None:
        assert not self.shares_weights, "a server has memory of its own"
        self.config: Any = self.model.config
        self._activity = RequestLog()
        self._running = set[asyncio.Task[Any]]()
        self._tokens_of_earlier = 0  # of earlier servers
        self._progress: object = None  # changes while the server generates; None: it does not say
        self._newest = self.version  # that the server may have received
        self._held: WeightFiles | None = None
        self._process: ServerProcess | None = None
        self.number_of_server = 0
        self._silent_server = -1
        self._last_lines = ""
        self._paused = self._is_released = False
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
    async def take(self, files: Sequence[Path]) -> dict[str, str]:
        """Load weights while halted; returns the hash of each tensor that the server has then."""

    @abstractmethod
    async def held_hashes(self) -> dict[str, str]: ...

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Label the loaded weights with this version."""

    @abstractmethod
    async def count_tokens(self) -> int:
        """The number of tokens generated by this server; asks its computing process, and sets
        `_progress`."""

    # The protocol of engines.

    async def __aenter__(self) -> "HttpEngine":
        self.folder = PrivateFolder("distflow-server-")
        self.socket = self.folder.path / "socket"
        self._changing = asyncio.Lock()
        self._updating = asyncio.Lock()
        at_socket = (self.url or self.own_url) == _AT_SOCKET
        transport = (
            httpx.AsyncHTTPTransport(uds=str(self.socket), limits=_NO_LIMITS) if at_socket else None
        )
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
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            if (watching := getattr(self, "_watching", None)) is not None:
                await cancel(watching)
        finally:
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
        with self._activity.busy():
            generations = await self._call(partial(self._generations, request, first))
            self._activity.responded(request, generations)
        return generations

    async def pause(self, release: bool = False) -> None:
        """See `RolloutEngine`. release: drops cached keys and values; the server's class decides
        what else."""
        async with self._updating:
            self._paused = True
            await self._call(self._release if release else self.halt)
            await self._call(self._count)
        self._activity.stopped()

    async def resume(self) -> None:
        async with self._updating:
            self._paused = False
            await self._call(self._go_on)

    async def hashes(self) -> dict[str, str]:
        return await self._call(self.held_hashes)

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """See `RolloutEngine`. Generation is halted only while the server reads complete files.
        Raises ValueError, with nothing changed, if weights do not fit."""
        check_version(self.version, version)
        if weights is None:
            async with self._updating:
                await self._call(partial(self._rename, version))
            return WeightReceipt(version, version_only=True)
        folder = await asyncio.get_running_loop().run_in_executor(None, self.write, weights)
        before = self._held
        await self.load_files(WeightFiles(version, folder))
        if before is not None:
            self.folder.drop(before.folder)
        assert self._held is not None, "just loaded"
        return WeightReceipt(version, dict(self._held.hashes))

    async def load_files(self, files: WeightFiles) -> None:
        """Load weights from files, which the caller keeps. If the server has them already, only the
        version changes."""
        is_there = self._held is not None and files.folder == self._held.folder
        async with self._updating:
            await self._call(
                partial(self._rename, files.version) if is_there else partial(self._update, files)
            )

    def holds(self, files: WeightFiles | None) -> bool:
        """Whether the server has these weights; None stands for its initial ones."""
        mine = self._held
        return files is None or (
            mine is not None and (mine.version, mine.folder) == (files.version, files.folder)
        )

    def take_activity(self) -> list[Activity]:
        """Its activity since the last call; callable from any thread."""
        return self._activity.take()

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

    async def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work`, again with the next server if this one is lost. Raises ServerFailed if none
        is available."""
        for number in range(1, MOST_SERVERS + 1):
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
            if self.in_fleet:
                if server == self.number_of_server != self._silent_server and await self._is_well():
                    continue
                raise ServerLost(f"{self.who} is lost ({why}){self._log_end()}")
            async with self._changing:
                if server == self.number_of_server and (
                    server == self._silent_server or not await self._is_well()
                ):
                    self._last_lines = self._log_end()
                    if number < MOST_SERVERS:
                        await self._replace(why)
        raise ServerFailed(
            f"{self.who} was lost {number} times at the same request: {why}{self._last_lines}"
        )

    # The server.

    async def restart(self, files: WeightFiles | None, why: str) -> None:
        """Start another server with these weights, for a fleet; for a given url, attach to whatever
        runs there now."""
        async with self._changing:
            self._held = files
            await self._replace(why)

    def abandon(self) -> None:
        """Treat the server as lost, along with its requests."""
        self._silent_server = self.number_of_server
        for task in list(self._running):
            task.cancel()

    async def _is_well(self) -> bool:
        """Whether only a connection was lost: an idle one that the server closed, or one to a
        predecessor."""
        try:
            return (
                await self.client.get("/health", timeout=SILENT_S)
            ).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def _replace(self, why: str) -> None:
        self.number_of_server += 1
        self._is_released &= self.url is not None  # our own server was restarted
        self._tokens_of_earlier = self.num_generated_tokens
        if self._process is not None:
            self._process.kill()
        if not self.in_fleet:
            _log.warning("%s is lost (%s): its requests go to the next", self.who, why)
        await self._start()

    async def _start(self) -> None:
        """Start a server or attach to a running one, and restore its predecessor's state."""
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
                "data.max_prompt_length and "
                f"data.max_response_length make {self.longest}: lower them, or start the server "
                "with a longer context"
            )
        if self._held is not None:
            await self._update(self._held)
        elif self._paused:
            await self.halt()
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
        return (
            f". The end of its log:\n{self._process.last_lines()}"
            if self._process is not None
            else ""
        )

    async def _watch(self) -> None:
        """Treat a server that neither answers nor computes as lost, and cancel its requests; also
        one that answers, but generates nothing for its requests."""
        while True:
            await asyncio.sleep(LOOKS_EVERY_S)
            if not (self._running or self.is_shared) or self._changing.locked():
                continue
            server = self.number_of_server
            ticks = self._process.cpu_ticks() if self._process is not None else -1
            if not await self._is_silent(
                SILENT_S if self.in_fleet or self._process is not None else ATTACH_S
            ):
                if self._is_stuck():
                    self.abandon()
                continue
            is_same = server == self.number_of_server and not self._changing.locked()
            if is_same and (self._process is None or self._process.cpu_ticks() == ticks):
                self.abandon()
                if self.is_shared and not self._running:
                    async with self._changing:
                        await self._replace("it did not respond")

    async def _is_silent(self, limit: float) -> bool:
        """Whether the server gives no answer for so many seconds."""
        try:
            await asyncio.wait_for(self._hear(), limit)
        except TimeoutError:
            return True
        return False

    async def _hear(self) -> None:
        """Wait until the server answers at all."""
        while True:
            try:
                return await self._count()
            except httpx.TransportError:  # if the machine is gone, open requests get no error
                await asyncio.sleep(LOOKS_EVERY_S)
            except (httpx.HTTPError, TrustError, ServerFailed, *MALFORMED):
                return None  # only a missing answer counts here

    def _is_stuck(self) -> bool:
        is_waiting = self._progress is not None and bool(self._running)
        return is_waiting and time.monotonic() - self._moved > STUCK_S

    async def _count(self) -> None:
        before = (self.num_generated_tokens, self._progress)
        earlier = self._tokens_of_earlier
        self.num_generated_tokens = earlier + await self.count_tokens()
        if (
            (self.num_generated_tokens, self._progress) != before
            or self._paused
            or self._updating.locked()
        ):
            self._moved = time.monotonic()

    # Weights.

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write weights as files into a folder. Raises ValueError if they do not fit the model."""
        own = self.parameters()
        return self.folder.save(checked(own, weights), sum(each.nbytes for each in own.values()))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of the model, by the names under which a trainer sends them."""
        named = unwrapped(self.model).named_parameters(remove_duplicate=False)
        return {plain_name(name): parameter for name, parameter in named}

    async def _update(self, files: WeightFiles) -> None:
        await self.halt_for_update()
        if self._is_released:
            await self.wake()
            self._is_released = False
        hashes = await self.take(sorted(files.folder.iterdir()))
        if files.hashes and hashes != files.hashes:
            raise lie(self.who, "with hashes of weights other than those that were sent")
        await self.set_label(label_of(files.version))
        # before its first token
        self.version = files.version
        self._held = replace(files, hashes=hashes)
        if not self._paused:
            await self.go_on()

    async def _rename(self, version: Version) -> None:
        self._newest = version  # responses that end meanwhile may have either version
        await self.set_label(label_of(version))
        self._held = self._held and replace(self._held, version=version)
        self.version = version

    async def _release(self) -> None:
        await self.drop_cache()
        if self.free_cache_engine:
            await self.sleep()
            self._is_released = True

    async def _go_on(self) -> None:
        if not self._is_released:
            await self.go_on()


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
