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
from typing import Any

from distflow.http_guard import Door, Guard, make_server
from distflow.import_target import check_server_packages
from distflow.tinker.futures import Conflict, Gone, TooMany
from distflow.tinker.messages import BadRequest, protocol
from distflow.tinker.ordered_requests import OrderedRequests, digest_of, read_json
from distflow.tinker.rest import FILES, Rest
from distflow.tinker.service import Service

MAX_BODY_BYTES = 64 * 2**20
_PROTOBUF = "application/x-protobuf"
_BODY_TYPES = frozenset({"application/json", _PROTOBUF})
_OLDEST_CLIENT = (0, 25)
_WAITS_S = 20.0
"""For a result, before the client asks again."""
_STOPS_WITHIN_S = 5
Json = dict[str, Any]


class TinkerServer:
    """Serves on the event loop of its caller."""

    def __init__(self, service: Service, key: str, host: str) -> None:
        """Raises UserError if packages are missing."""
        check_server_packages("--tinker", "tinker")
        protocol()
        self._service = service
        self._requests = OrderedRequests(service)
        route = import_module("starlette.routing").Route

        def post(path: str, answer: Callable[[Any], Awaitable[Any]]) -> Any:
            return route(f"/api/v1/{path}", partial(_answered, answer), methods=["POST"])

        def get(path: str, answer: Callable[[Any], Awaitable[Any]]) -> Any:
            return route(f"/api/v1/{path}", partial(_answered, answer), methods=["GET"])

        routes = [
            get("healthz", self._health),
            get("get_server_capabilities", self._capabilities),
            post("client/config", self._config),
            post("telemetry", self._telemetry),
            post("create_session", self._create_session),
            post("session_heartbeat", self._heartbeat),
            post("sessions/{session}/finish", self._finish),
            post("create_model", self._create_model),
            post("get_info", self._info),
            post("forward_backward", partial(self._ordered, "forward_backward")),
            post("optim_step", partial(self._ordered, "optim_step")),
            post("save_weights", partial(self._ordered, "save_weights")),
            post("save_weights_for_sampler", partial(self._ordered, "save_weights_for_sampler")),
            post("save_weights_external", partial(self._ordered, "save_weights_external")),
            post("load_weights", self._load),
            post("create_sampling_session", self._open_sampling),
            get("samplers/{sampler}", self._sampler),
            post("asample", self._sample),
            post("retrieve_future", self._retrieve),
            post("cancel_future", self._cancel),
            post("weights_info", self._weights_info),
            *(
                route(f"/api/v1/{path}", partial(_answered, answer), methods=[method])
                for method, path, answer in Rest(service).routes()
            ),
            route("/{path:path}", _no_route, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        app = import_module("starlette.applications").Starlette(routes=routes)
        guard = Guard(host, key, MAX_BODY_BYTES, _BODY_TYPES, secret_below=FILES)
        self._server = make_server(app, guard, (), _STOPS_WITHIN_S)
        self._server.capture_signals = nullcontext  # `serve` has its own

    async def serve(self, listening: socket.socket) -> None:
        """Until Ctrl-C or SIGTERM. Called on the main thread."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for number, handler in previous.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            # clients that wait for results are answered, so that their connections end
            self._service.futures.cancel_all("")
            self._server.should_exit = True

        # what a handler of Python's raises within a request, the server catches
        for number in previous:
            loop.add_signal_handler(number, stop)

        try:
            await self._requests.restore()
            await self._server.serve([Door(listening)])
        finally:
            await self._service.close()

    async def _health(self, request: Any) -> Json:
        return {"status": "ok"}

    async def _capabilities(self, request: Any) -> Json:
        base = self._service.base
        model = {"model_name": base.name, "max_context_length": base.context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    async def _config(self, request: Any) -> Json:
        return {"use_pyqwest_transport": False}

    async def _telemetry(self, request: Any) -> Json:
        """Nobody reads what clients report of themselves."""
        return {"status": "accepted"}

    async def _create_session(self, request: Any) -> Json:
        _check_client((await _body(request)).get("sdk_version"))
        return {"type": "create_session", "session_id": self._service.create_session()}

    async def _heartbeat(self, request: Any) -> Json:
        self._service.heartbeat((await _body(request))["session_id"])
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Any) -> Json:
        self._service.end_session(request.path_params["session"])
        return {}

    async def _create_model(self, request: Any) -> Json:
        return self._requests.create("create_model", await _content(request))

    async def _info(self, request: Any) -> Json:
        return self._service.info((await _body(request))["model_id"])

    async def _ordered(self, kind: str, request: Any) -> Json:
        return self._requests.accept(kind, await _content(request))

    async def _load(self, request: Any) -> Json:
        """Into a model, or into a new one."""
        content = await _content(request)
        if read_json(content).get("session_id") is None:
            return self._requests.accept("load_weights", content)
        return self._requests.create("load_weights", content)

    async def _open_sampling(self, request: Any) -> Json:
        body = await _body(request)
        opened = self._service.open_sampling(
            body["session_id"], body["sampling_session_seq_id"], body.get("model_path")
        )
        return {"type": "create_sampling_session", "sampling_session_id": opened}

    async def _sampler(self, request: Any) -> Json:
        return self._service.sampling(request.path_params["sampler"])

    async def _sample(self, request: Any) -> Json:
        body = await _body(request)
        number = int(body.get("seq_id") or 0)

        name = body.get("sampling_session_id")
        if name is None:
            request_id = f"sample:{secrets.token_hex(12)}"
        else:
            request_id = f"{name}:{number}"

        work = partial(self._service.sample, number, body)
        self._service.futures.submit(request_id, digest_of(body), work)
        count = int(body.get("num_samples", 1))
        ids = [f"{request_id}:{index}" for index in range(count)]

        return {"request_id": request_id, "model_id": None, "sample_sequence_ids": ids}

    async def _retrieve(self, request: Any) -> Any:
        request_id = (await _body(request))["request_id"]
        responses = import_module("starlette.responses")

        try:
            result = await self._service.futures.result(request_id, _WAITS_S)
        except BadRequest as error:
            return {"error": str(error), "category": "user"}
        except Gone:
            raise
        except Exception as error:  # whatever went wrong in the work is told to its client
            return {"error": f"{type(error).__name__}: {error}", "category": "server"}

        if result is None:
            again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return responses.JSONResponse(again, 408)
        if isinstance(result, bytes):
            return responses.Response(result, media_type=_PROTOBUF)

        return result

    async def _cancel(self, request: Any) -> Json:
        self._service.futures.cancel((await _body(request))["request_id"])
        return {}

    async def _weights_info(self, request: Any) -> Json:
        path = (await _body(request))["tinker_path"]
        return self._service.checkpoints.info(path, self._service.base.name)


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


async def _body(request: Any) -> Json:
    return read_json(await _content(request))


async def _answered(answer: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    responses = import_module("starlette.responses")
    try:
        found = await answer(request)
    except KeyError as error:
        return responses.JSONResponse({"detail": f"there is no {error}"}, 404)
    except Gone as error:
        return responses.JSONResponse({"detail": str(error)}, 410)
    except Conflict as error:
        return responses.JSONResponse({"detail": str(error)}, 409)
    except TooMany as error:
        return responses.JSONResponse({"detail": str(error)}, 429)
    except (BadRequest, TypeError, ValueError) as error:
        return responses.JSONResponse({"detail": str(error)}, 422)

    if isinstance(found, dict):
        return responses.JSONResponse(found)
    return found


async def _no_route(request: Any) -> Any:
    path = request.path_params["path"]
    said = f"{request.method} /{path} is not served here: see docs/tinker.md"
    return import_module("starlette.responses").JSONResponse({"detail": said}, 404)
