"""The HTTP routes of the Tinker API (client 0.38)."""

import asyncio
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from inspect import isawaitable
from pathlib import Path
from typing import Any

from distflow.http_guard import Door, Guard, make_server
from distflow.import_target import check_server_packages
from distflow.tinker.futures import Conflict, Gone, TooMany
from distflow.tinker.messages import BadRequest, Json, WorkerLost, digest_of, protocol, read_json
from distflow.tinker.rest import FILES, Rest
from distflow.tinker.service import BaseModel, Service

MAX_BODY_BYTES = 64 * 2**20
_PROTOBUF = "application/x-protobuf"
_BODY_TYPES = frozenset({"application/json", _PROTOBUF})
_OLDEST_CLIENT = (0, 25)
_WAITS_S = 20.0
"""For a result, before the client asks again."""
_STOPS_WITHIN_S = 5
_ORDERED = (
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
)
_STATUS = {KeyError: 404, Gone: 410, Conflict: 409, TooMany: 429}
"""Of errors; others are mistakes in a request."""
Answer = Callable[[Any], Awaitable[Any]]
"""Of a request of Starlette's: a JSON object or a response of Starlette's."""


class TinkerServer:
    """Serves on the event loop of its caller."""

    def __init__(self, base: BaseModel, folder: Path, key: str, host: str) -> None:
        """folder: see `Service`. Raises UserError, also if packages are missing."""
        check_server_packages("--tinker", "tinker")
        protocol()
        service = self._service = Service(base, folder, self._lose)
        self._lost: WorkerLost | None = None
        posts: dict[str, Callable[[Json], Any]] = {
            "client/config": lambda given: {"use_pyqwest_transport": False},
            # nobody reads what clients report of themselves
            "telemetry": lambda given: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": lambda given: service.info(given["model_id"]),
            "create_sampling_session": self._open_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
        }
        routes: list[tuple[str, str, Answer]] = [*Rest(service).routes()]
        routes.append(("POST", "sessions/{session}/finish", self._finish))
        for path, answered in posts.items():
            routes.append(("POST", path, partial(_read, answered)))
        for kind in _ORDERED:
            routes.append(("POST", kind, partial(self._ordered, kind)))

        make_route = import_module("starlette.routing").Route
        made = []
        for method, path, answer in routes:
            made.append(make_route(f"/api/v1/{path}", partial(_answered, answer), methods=[method]))
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        made.append(make_route("/{path:path}", _no_route, methods=methods))
        app = import_module("starlette.applications").Starlette(routes=made)
        guard = Guard(host, key, MAX_BODY_BYTES, _BODY_TYPES, secret_below=FILES)
        self._server = make_server(app, guard, (), _STOPS_WITHIN_S)
        self._server.capture_signals = nullcontext  # `serve` has its own

    async def serve(self, listening: socket.socket) -> None:
        """Until Ctrl-C or SIGTERM. Called on the main thread. Raises WorkerLost."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for number, handler in previous.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            self._stop()

        # what a handler of Python's raises within a request, the server catches
        for number in previous:
            loop.add_signal_handler(number, stop)

        try:
            await self._service.restore()
            await self._server.serve([Door(listening)])
        finally:
            await self._service.close()
        if self._lost is not None:
            raise self._lost

    def _lose(self, error: WorkerLost) -> None:
        self._lost = error
        self._stop()

    def _stop(self) -> None:
        self._server.should_exit = True
        # clients that wait for results are answered, so that their connections end
        self._service.futures.cancel_all()

    async def _ordered(self, kind: str, request: Any) -> Json:
        return await self._service.accept(kind, await _content(request))

    def _create_session(self, given: Json) -> Json:
        _check_client(given.get("sdk_version"))
        return {"type": "create_session", "session_id": self._service.create_session()}

    def _heartbeat(self, given: Json) -> Json:
        self._service.sessions.note_seen(given["session_id"])
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Any) -> Json:
        self._service.end_session(request.path_params["session"])
        return {}

    def _open_sampler(self, given: Json) -> Json:
        number = given["sampling_session_seq_id"]
        path = given.get("model_path")
        opened = self._service.open_sampler(given["session_id"], number, path)
        return {"type": "create_sampling_session", "sampling_session_id": opened}

    def _sample(self, given: Json) -> Json:
        number = int(given.get("seq_id") or 0)
        name = given.get("sampling_session_id")
        request_id = f"{name}:{number}" if name else f"sample:{secrets.token_hex(12)}"
        work = partial(self._service.sample, number, given)
        self._service.futures.submit(request_id, digest_of(given), work)
        count = int(given.get("num_samples", 1))
        ids = [f"{request_id}:{index}" for index in range(count)]
        return {"request_id": request_id, "model_id": None, "sample_sequence_ids": ids}

    async def _retrieve(self, given: Json) -> Any:
        request_id = given["request_id"]
        responses = import_module("starlette.responses")
        try:
            result = await self._service.futures.result(request_id, _WAITS_S)
        except Exception as error:  # whatever went wrong in the work is told to its client
            if self._server.should_exit:
                # the next server on the folder carries it out
                result = None
            elif isinstance(error, Gone):
                raise
            elif isinstance(error, BadRequest):
                return {"error": str(error), "category": "user"}
            else:
                return {"error": f"{type(error).__name__}: {error}", "category": "server"}

        if result is None:
            again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return responses.JSONResponse(again, 408)
        # no message begins with the field of this letter
        kind = "application/json" if result.startswith(b"{") else _PROTOBUF
        return responses.Response(result, media_type=kind)

    def _cancel(self, given: Json) -> Json:
        self._service.futures.cancel(given["request_id"])
        return {}

    def _weights_info(self, given: Json) -> Json:
        return self._service.checkpoints.info(given["tinker_path"], self._service.base.name)


def _check_client(version: object) -> None:
    """Raises BadRequest for one that sends JSON where others send protobuf."""
    parts = re.match(r"(\d+)\.(\d+)", str(version))
    if parts and (int(parts[1]), int(parts[2])) < _OLDEST_CLIENT:
        raise BadRequest(
            f"client {version!r:.40} speaks an older protocol: pip install 'tinker>=0.38,<0.40'"
        )


async def _content(request: Any) -> bytes:
    """What a request sends, unpacked. Raises BadRequest."""
    coding = request.headers.get("content-encoding", "identity")
    if coding not in ("identity", "zstd"):
        raise BadRequest(f"Content-Encoding is {coding!r:.40}: send zstd, or no encoding")

    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            break

    if coding == "zstd":
        zstandard = import_module("zstandard")
        packed = zstandard.ZstdDecompressor().stream_reader(bytes(content))
        try:
            content = packed.read(MAX_BODY_BYTES + 1)
        except zstandard.ZstdError as error:
            raise BadRequest(f"the body is no zstd: {error}") from error

    if len(content) > MAX_BODY_BYTES:
        raise BadRequest(f"a request may have at most {MAX_BODY_BYTES:,} bytes: send fewer data")
    return bytes(content)


async def _read(answer: Callable[[Json], Any], request: Any) -> Any:
    """What is answered to a JSON object."""
    found = answer(read_json(await _content(request)))
    return await found if isawaitable(found) else found


async def _answered(answer: Answer, request: Any) -> Any:
    responses = import_module("starlette.responses")
    try:
        found = await answer(request)
    except (*_STATUS, BadRequest, TypeError, ValueError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        return responses.JSONResponse({"detail": said}, _STATUS.get(type(error), 422))
    return responses.JSONResponse(found) if isinstance(found, dict) else found


async def _no_route(request: Any) -> Any:
    path = request.path_params["path"]
    said = f"{request.method} /{path} is not served here: see docs/tinker.md"
    return import_module("starlette.responses").JSONResponse({"detail": said}, 404)
