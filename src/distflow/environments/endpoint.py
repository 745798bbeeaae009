"""The HTTP server for clients of OpenAI and Anthropic. It runs on its own thread, and knows only
sessions: a key, and a function that answers calls."""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from distflow.environments.anthropic_format import MESSAGES
from distflow.environments.endpoint_calls import (
    Answer,
    Call,
    Events,
    Json,
    RequestError,
    Wire,
)
from distflow.environments.openai_format import CHAT, RESPONSES, TEXT
from distflow.errors import UserError
from distflow.http_guard import Guard, is_same, key_of, make_server
from distflow.import_target import check_server_packages

MAX_BODY_BYTES = 4 * 2**20
ROUTES = {
    "chat/completions": CHAT,
    "completions": TEXT,
    "responses": RESPONSES,
    "messages": MESSAGES,
}
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_STOPS_WITHIN_S = 5
_NOT_REFUSED = (410, 499, 503)
"""Statuses of calls whose episode or client has gone."""
_ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
Submit = Callable[[Call], "Future[Answer]"]


@dataclass(frozen=True)
class Session:
    """A session has its own key and base URL. model: the only accepted name; None for any, as in
    episodes. refused: the reason for each rejected call."""

    key: str
    base_url: str
    submit: Submit
    model: str | None = None
    refused: list[RequestError] = field(default_factory=list)


class Endpoint:
    """Listens from its construction until `close`, on a loopback socket of its own unless one is
    given."""

    def __init__(self, listening: socket.socket | None = None) -> None:
        check_server_packages("the endpoint", "endpoint")
        starlette = import_module("starlette.applications")
        routing = import_module("starlette.routing")
        self._socket = listening or socket.create_server(("127.0.0.1", 0))

        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        self._sessions: dict[str, Session] = {}
        routes = []
        for prefix in ("", "/episodes/{name}"):
            routes.append(routing.Route(f"{prefix}/v1/models", self._models))
            for path, wire in ROUTES.items():
                routes.append(
                    routing.Route(
                        f"{prefix}/v1/{path}", partial(self._answer, wire), methods=["POST"]
                    )
                )

        for prefix in ("/episodes/{name}", ""):
            routes.append(
                routing.Route(f"{prefix}/{{path:path}}", self._no_route, methods=_METHODS)
            )

        # A session has a key of its own, and the requests that it sent wrongly.
        guard = Guard(host, token=None, max_body_bytes=None)
        self._server = make_server(starlette.Starlette(routes=routes), guard, (), _STOPS_WITHIN_S)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="endpoint", daemon=True
        )
        self._thread.start()

    @contextmanager
    def session(self, submit: Submit) -> Iterator[Session]:
        """A session with a random key, as long as it is open. submit: called on the endpoint's
        thread."""
        name = secrets.token_urlsafe(12)
        self._sessions[name] = made = Session(
            secrets.token_urlsafe(24), f"{self.url}/episodes/{name}", submit
        )
        try:
            yield made
        finally:
            del self._sessions[name]

    def serve(self, key: str, submit: Submit, model: str) -> Session:
        """A session at the routes without a name, until the end."""
        self._sessions[""] = made = Session(key, self.url, submit, model)
        return made

    def close(self) -> None:
        """Idempotent."""
        self._server.should_exit = True
        self._thread.join(2 * _STOPS_WITHIN_S)

    def _found(self, request: Any) -> Session:
        session = self._sessions.get(request.path_params.get("name", ""))
        if session is None or not is_same(key_of(request.headers.items()), session.key):
            said = "the API key is not that of this base URL, or the episode has ended"
            raise RequestError(401, said, "invalid_api_key")
        return session

    async def _models(self, request: Any) -> Any:
        try:
            name = self._found(request).model or "policy"
        except RequestError as error:
            return _failed(request, error)

        of_openai = {"object": "model", "created": int(time.time()), "owned_by": "distflow"}
        of_anthropic = {"type": "model", "display_name": name}
        listed = [{"id": name, **of_openai, **of_anthropic}]
        return _response(200, {"object": "list", "data": listed, "has_more": False})

    async def _no_route(self, request: Any) -> Any:
        try:
            session = self._found(request)
        except RequestError as error:
            return _failed(request, error)

        known = ", ".join(f"/v1/{known}" for known in (*ROUTES, "models"))
        path = request.path_params["path"]
        said = f"there is no route {request.method} /{path}: there are {known}"
        session.refused.append(RequestError(404, said, "not_found"))

        return _failed(request, session.refused[-1])

    async def _answer(self, wire: Wire, request: Any) -> Any:
        refused: list[RequestError] = []
        try:
            session = self._found(request)
            refused = session.refused

            body = await _body(request)
            if session.model is not None and body.get("model") != session.model:
                raise RequestError(
                    404,
                    f"there is no model {body.get('model')!r:.80}: it is {session.model!r}",
                    "model_not_found",
                )

            call = _read(wire, body)
            answer = await _awaited(request, session.submit(call))
        except RequestError as error:
            if error.status not in _NOT_REFUSED:
                refused.append(error)
            return _failed(request, error)

        head = _head(body)
        if not body.get("stream"):
            return _response(200, wire.write(body, answer, head))

        return import_module("starlette.responses").StreamingResponse(
            _lines(wire.stream(body, answer, head)), media_type="text/event-stream"
        )


def _head(body: Json) -> Json:
    return {
        "id": secrets.token_hex(8),
        "created": int(time.time()),
        "model": str(body.get("model")),
    }


def _read(wire: Wire, body: Json) -> Call:
    """The call. Raises RequestError."""
    try:
        call: Call = wire.read(body)
        return call
    except RequestError:
        raise
    except KeyError as error:
        raise RequestError(400, f"the request is invalid: {error} is missing") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RequestError(400, f"the request is invalid: {error}") from None


async def _body(request: Any) -> Json:
    text = bytearray()
    try:
        async for part in request.stream():
            text += part
            if len(text) > MAX_BODY_BYTES:
                raise RequestError(
                    413, f"a request may have at most {MAX_BODY_BYTES:,} bytes", "request_too_large"
                )
    except import_module("starlette.requests").ClientDisconnect:
        raise RequestError(499, "the client has closed the connection") from None

    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is not JSON: {error}") from None

    if not isinstance(body, dict):
        raise RequestError(400, "a request is a JSON object")
    return body


async def _awaited(request: Any, future: "Future[Answer]") -> Answer:
    """The answer to a request. If the client disconnects, the call is cancelled. Raises
    RequestError."""
    answering = asyncio.wrap_future(future)
    going = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answering, going), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        answering.cancel()
        raise
    finally:
        going.cancel()

    if not answering.done():
        answering.cancel()
        raise RequestError(499, "the client has closed the connection")
    if answering.cancelled():
        raise RequestError(503, "the call was cancelled", "server_error")

    error = answering.exception()
    if error is None:
        return answering.result()
    if isinstance(error, RequestError):
        raise error

    is_refused = isinstance(error, UserError)
    raise RequestError(
        400 if is_refused else 500,
        str(error),
        "invalid_request_error" if is_refused else "server_error",
    )


def _failed(request: Any, error: RequestError) -> Any:
    """The response that both kinds of clients recognise as an error."""
    is_ours = error.status >= 500
    kind = "invalid_request_error"
    if "anthropic-version" in request.headers:
        kind = "api_error" if is_ours else _ANTHROPIC_TYPES.get(error.status, kind)
    elif is_ours:
        kind = "server_error"

    # Without a key nobody holds a connection, whose body would come next.
    closes = None
    if error.status in (401, 410, 413):
        closes = {"connection": "close"}

    shown = {"message": str(error), "type": kind, "code": error.code, "param": None}
    return _response(error.status, {"type": "error", "error": shown}, closes)


def _response(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Any:
    return import_module("starlette.responses").JSONResponse(body, status, headers)


def _lines(events: Events) -> Iterator[str]:
    for number, (name, data) in enumerate(events):
        if isinstance(data, dict) and "sequence_number" in data:
            data["sequence_number"] = number
        head = f"event: {name}\n" if name else ""
        yield f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
