"""The HTTP server for clients of OpenAI and Anthropic. It runs on its own thread, and knows only
sessions: a key, and a function that answers calls."""

import asyncio
import itertools
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

from distflow.environments.anthropic_format import MESSAGES
from distflow.environments.endpoint_calls import (
    Answer,
    Call,
    Events,
    Json,
    Piece,
    RequestError,
    Wire,
)
from distflow.environments.openai_format import (
    CHAT,
    RESPONSES,
    TEXT,
    continued,
    input_items,
    output_items,
)
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
_ENDED_KEPT = 10_000
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_STOPS_WITHIN_S = 5
_NOT_REFUSED = (410, 499, 503)
"""Statuses of calls whose episode or client has gone."""
_ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
Submit = Callable[[Call], "Future[Answer]"]


@dataclass(frozen=True)
class Session:
    """A session has its own key and base URL. model: the only accepted name; None for any, as in
    episodes. refused: the reason for each rejected call. responses: by id, the items up to each
    response of an episode as JSON. texts: these items, each once, since clients may send the whole
    history in each request."""

    key: str
    base_url: str
    submit: Submit
    model: str | None = None
    refused: list[RequestError] = field(default_factory=list)
    responses: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def keep(self, body: Json, head: Json, answering: "asyncio.Task[list[Answer]]") -> None:
        """Keep the items up to a response, for requests that continue it."""
        if self.model is None and not answering.cancelled() and answering.exception() is None:
            items = map(json.dumps, (*input_items(body), *output_items(answering.result(), head)))
            self.responses[head["id"]] = [self.texts.setdefault(item, item) for item in items]


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
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)
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
            self._ended.append(name)

    def serve(self, key: str, submit: Submit, model: str) -> Session:
        """A session at the routes without a name, until the end."""
        self._sessions[""] = made = Session(key, self.url, submit, model)
        return made

    def close(self) -> None:
        """Idempotent."""
        self._server.should_exit = True
        self._thread.join(2 * _STOPS_WITHIN_S)

    def _found(self, request: Any) -> Session:
        name = request.path_params.get("name", "")
        session = self._sessions.get(name)
        if session is None and name in self._ended:
            raise RequestError(
                410, "this episode has ended: its endpoint answers no more calls", "episode_ended"
            )
        if session is None or not is_same(key_of(request.headers.items()), session.key):
            raise RequestError(401, "the API key is not that of this base URL", "invalid_api_key")
        return session

    async def _models(self, request: Any) -> Any:
        try:
            name = self._found(request).model or "policy"
        except RequestError as error:
            return _failed(request, error)
        model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "distflow"}
        listed = {
            "object": "list",
            "data": [{**model, "type": "model", "display_name": name}],
            "has_more": False,
        }
        return _response(200, {**listed, "first_id": name, "last_id": name})

    async def _no_route(self, request: Any) -> Any:
        refused = list[RequestError]()
        path = request.path_params["path"]
        known = ", ".join(f"/v1/{known}" for known in ROUTES)
        try:
            refused = self._found(request).refused
            said = (
                f"there is no route {request.method} /{path}: there are {known} (POST) and "
                "/v1/models (GET)"
            )
            raise RequestError(404, said, "not_found")
        except RequestError as error:
            refused.append(error)
            return _failed(request, error)

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
            body, call = _read(wire, body, session.responses)
            pieces = _Pieces()
            head = _head(body)
            # 0 wants them too
            wants_log_probs = body.get("logprobs") is not None and body["logprobs"] is not False
            if body.get("stream") and call.n == 1 and not wants_log_probs:
                call = replace(call, told=pieces.tell)
            asked = [session.submit(replace(call, choice=i)) for i in range(call.n)]
            answering = asyncio.ensure_future(_awaited(request, asked))
            answering.add_done_callback(_retrieve)
            if wire is RESPONSES:
                answering.add_done_callback(partial(session.keep, body, head))
            answering.add_done_callback(pieces.end)
            first = await pieces.next() if body.get("stream") else None
            answers = await answering if first is None else []
        except RequestError as error:
            if error.status not in _NOT_REFUSED:
                refused.append(error)
            return _failed(request, error)
        if not body.get("stream"):
            return _response(200, wire.write(body, answers, head))
        lines = _lines(_events(partial(wire.stream, body, head=head), first, pieces, answering))
        return import_module("starlette.responses").StreamingResponse(
            lines, media_type="text/event-stream"
        )


def _head(body: Json) -> Json:
    return {
        "id": secrets.token_hex(8),
        "created": int(time.time()),
        "model": str(body.get("model")),
    }


class _Pieces:
    """The text of an answer while it is drawn, from the policy's thread to the endpoint's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[str | None]()
        self.next = self._queue.get
        """A piece; None after the last one."""

    def tell(self, text: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, text)

    def end(self, _: object) -> None:
        self._queue.put_nowait(None)


async def _events(
    stream: Callable[..., Events],
    piece: str | None,
    pieces: _Pieces,
    answering: "asyncio.Task[list[Answer]]",
) -> AsyncIterator[tuple[str, Json | str]]:
    """The events of an answer, its text in pieces as they come, from the first on. stream: of a
    wire, from answers."""
    sent = ""
    try:
        while piece is not None:
            for event in stream(answers=[Answer(piece, (), "stop", None, (), 0)]):
                if isinstance(event, Piece):
                    yield event.name, event.data(piece)
                    break
                if not sent:
                    yield event
            sent += piece
            piece = await pieces.next()
        is_new = not sent
        for event in stream(answers=await answering):
            if not isinstance(event, Piece):
                if is_new:
                    yield event
                continue
            is_new = True
            rest = event.text.removeprefix(sent)
            if rest:
                yield event.name, event.data(rest)
    except RequestError as error:
        yield "error", _shown(error, "server_error")
    finally:
        answering.cancel()  # no effect if done


def _read(wire: Wire, body: Json, responses: Mapping[str, list[str]]) -> tuple[Json, Call]:
    """The body, with the items of the response that it continues, and the call."""
    try:
        body = continued(body, responses) if wire is RESPONSES else body
        call: Call = wire.read(body)
        return body, call
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


async def _awaited(request: Any, futures: "list[Future[Answer]]") -> list[Answer]:
    """The answers to a request. If the client disconnects, the calls are cancelled. Raises
    RequestError."""
    answering = asyncio.gather(*map(asyncio.wrap_future, futures))
    answering.add_done_callback(_retrieve)
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


def _retrieve(done: "asyncio.Future[Any]") -> None:
    """Nobody asks for the error of a client that has gone, and asyncio would print it."""
    if not done.cancelled():
        done.exception()


def _failed(request: Any, error: RequestError) -> Any:
    """The response that both kinds of clients recognise as an error."""
    is_ours = error.status >= 500
    kind = "invalid_request_error"
    if "anthropic-version" in request.headers:
        kind = "api_error" if is_ours else _ANTHROPIC_TYPES.get(error.status, kind)
    elif is_ours:
        kind = "server_error"
    # Without a key nobody holds a connection, whose body would come next.
    closes = {"connection": "close"} if error.status in (401, 410, 413) else None
    return _response(error.status, _shown(error, kind), closes)


def _shown(error: RequestError, kind: str) -> Json:
    return {
        "type": "error",
        "error": {"message": str(error), "type": kind, "code": error.code, "param": None},
    }


def _response(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Any:
    return import_module("starlette.responses").JSONResponse(body, status, headers)


async def _lines(events: AsyncIterator[tuple[str, Json | str]]) -> AsyncIterator[str]:
    number = itertools.count()
    async for name, data in events:
        if isinstance(data, dict) and "sequence_number" in data:
            data["sequence_number"] = next(number)
        head = f"event: {name}\n" if name else ""
        yield f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
        await asyncio.sleep(0)  # a lost connection is noticed between two events
