"""What clients ask about the server: sessions, training runs, checkpoints and their files."""

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from distflow.tinker.checkpoints import when
from distflow.tinker.messages import Json
from distflow.tinker.service import Service

FILES = "/api/v1/files/"
"""Paths below it are secret."""
_URLS_LAST_S = 3600
Answer = Callable[[Any], Awaitable[Any]]


class Rest:
    """Its answers raise KeyError and BadRequest."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._checkpoints = service.checkpoints
        self._shown: dict[str, tuple[Path, float]] = {}
        """Folders whose files have addresses, and until when."""

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Method, path below /api/v1/, and answer."""
        run = "training_runs/{model}"
        checkpoint = f"{run}/checkpoints/{{kind}}/{{name}}"
        yield "GET", "healthz", self._health
        yield "GET", "get_server_capabilities", self._capabilities
        yield "GET", "samplers/{sampler}", self._sampler
        yield "GET", "sessions", self._sessions
        yield "GET", "sessions/{session}", self._session
        yield "GET", "training_runs", self._runs
        yield "GET", run, self._run
        yield "GET", "checkpoints", self._listed
        yield "GET", f"{run}/checkpoints", self._listed
        yield "DELETE", checkpoint, self._delete
        yield "PUT", f"{checkpoint}/ttl", self._expire
        yield "GET", f"{checkpoint}/external_weights_urls", self._urls
        yield "GET", "files/{secret}/{file}", self._file

    async def _health(self, request: Any) -> Json:
        return {"status": "ok"}

    async def _capabilities(self, request: Any) -> Json:
        base = self._service.base
        model = {"model_name": base.name, "max_context_length": base.context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    async def _sampler(self, request: Any) -> Json:
        name = request.path_params["sampler"]
        path = self._service.sessions.weights_of(name)
        return {"sampler_id": name, "base_model": self._service.base.name, "model_path": path}

    async def _sessions(self, request: Any) -> Json:
        return {"sessions": _page(request, self._service.sessions.listed())[0]}

    async def _session(self, request: Any) -> Json:
        session = request.path_params["session"]
        samplers = self._service.sessions.samplers(session)
        return {"training_run_ids": self._service.models_of(session), "sampler_ids": samplers}

    async def _runs(self, request: Any) -> Json:
        page, cursor = _page(request, self._checkpoints.training_runs())
        return {"training_runs": page, "cursor": cursor}

    async def _run(self, request: Any) -> Json:
        return self._checkpoints.training_run(request.path_params["model"])

    async def _listed(self, request: Any) -> Json:
        listed = self._checkpoints.listed(request.path_params.get("model", "*"))
        page, cursor = _page(request, listed)
        return {"checkpoints": page, "cursor": cursor}

    async def _delete(self, request: Any) -> Json:
        self._checkpoints.delete(_path(request))
        return {}

    async def _expire(self, request: Any) -> Json:
        self._checkpoints.expire(_path(request), (await request.json())["ttl_seconds"])
        return {}

    async def _urls(self, request: Any) -> Json:
        """For whoever has them, while they last."""
        secret = secrets.token_urlsafe(24)
        folder = self._checkpoints.find(_path(request))
        expires = time.time() + _URLS_LAST_S
        self._shown[secret] = (folder, expires)
        start = f"{str(request.base_url).rstrip('/')}{FILES}{secret}"
        urls = {file.name: f"{start}/{file.name}" for file in folder.glob("[!.]*")}
        return {"urls": urls, "expires": when(expires)}

    async def _file(self, request: Any) -> Any:
        folder, expires = self._shown[request.path_params["secret"]]
        file = folder / request.path_params["file"]
        if expires < time.time() or not file.is_file():
            raise KeyError(file.name)
        return import_module("starlette.responses").FileResponse(file)


def _path(request: Any) -> str:
    found = request.path_params
    return f"tinker://{found['model']}/{found['kind']}/{found['name']}"


def _page(request: Any, listed: list[Any]) -> tuple[list[Any], Json]:
    """What is asked for of a list, and where that is."""
    offset = int(request.query_params.get("offset", 0))
    limit = int(request.query_params.get("limit", len(listed)))
    cursor = {"offset": offset, "limit": limit, "total_count": len(listed)}
    return listed[offset : offset + limit], cursor
