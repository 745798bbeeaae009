"""Scores a response on another machine, by a server that `distflow sandbox serve` started.
Connection errors are faults of the sandbox, not results of a program."""

import http.client
import json
import os
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

from distflow.errors import UserError
from distflow.http_guard import is_loopback, token_of
from distflow.observe.crash_safe_files import JSON
from distflow.sandbox.interface import SandboxFault

TOKEN = "DISTFLOW_SANDBOX_TOKEN"
"""The environment variable with the password that a server and its clients share. Without it, a
server that listens on this machine alone makes one, which clients of its user find."""
PATH = "/v1/score"

_WAITS_S = (0.2, 0.4, 0.8, 1.6)
_BUSY_S = 60.0
_SLACK_S = 30.0
_MAX_BYTES = 2**20
_SHOWN = 300


def score_at(
    url: str, response: str, ground_truth: object, row: Mapping[str, object], seconds: float
) -> dict[str, JSON]:
    """The server's result for the response. seconds: how long scoring may take.

    A request is repeated while the connection fails, a few times, and while all places of the
    server are taken. Raises UserError if the URL is not that of a server, ValueError if the tests
    are broken, SandboxFault.
    """
    server = _server_of(url)
    request = {"response": response, "ground_truth": ground_truth, "row": row, "seconds": seconds}
    body = json.dumps(request).encode()
    waits_s = list(_WAITS_S)
    busy_until = time.monotonic() + _BUSY_S

    while True:
        try:
            status, reply = _exchange(server, body, seconds + _SLACK_S)
        except (OSError, http.client.HTTPException) as error:
            if not waits_s:
                reason = str(error) or type(error).__name__
                raise SandboxFault(f"the sandbox at {url} does not reply: {reason}") from None
            time.sleep(waits_s.pop(0))
            continue

        if status != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > busy_until:
            break
        time.sleep(_WAITS_S[0])

    if status != HTTPStatus.OK:
        reason = str(reply.get("error", ""))[:_SHOWN]
        hint = ""
        if status == HTTPStatus.UNAUTHORIZED:
            hint = f" (see {TOKEN})"
        raise SandboxFault(f"the sandbox at {url} answers {status}: {reason}{hint}")

    if "error" in reply:
        raise ValueError(str(reply["error"]))

    result = reply.get("result")
    if not isinstance(result, dict):
        raise SandboxFault(f"the sandbox at {url} sent an invalid reply: it has no result")
    return {**result, "sandbox": f"{result.get('sandbox')} at {url}"}


def _server_of(url: str) -> SplitResult:
    """Raises UserError."""
    try:
        server = urlsplit(url)
        is_right = server.scheme in ("http", "https") and bool(server.hostname)
        is_right = is_right and not (server.username or server.query)
        server.port  # noqa: B018  raises ValueError for one that is no number
    except ValueError:
        is_right = False

    if not is_right:
        raise UserError(
            f"'{url}' is not the URL of a sandbox: write e.g. http://host:8750, its password in "
            f"{TOKEN}"
        )

    return server


def _exchange(server: SplitResult, body: bytes, timeout_s: float) -> tuple[int, dict[str, Any]]:
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    host = str(server.hostname)
    connection = kinds[server.scheme](host, server.port, timeout=timeout_s)
    token = os.environ.get(TOKEN, "")
    if not token and is_loopback(host):
        token = token_of(connection.port)

    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    try:
        connection.request("POST", server.path.rstrip("/") + PATH, body, headers)
        answer = connection.getresponse()
        read = answer.read(_MAX_BYTES + 1)
    finally:
        connection.close()

    if len(read) > _MAX_BYTES:
        raise http.client.HTTPException("its answer is too long")

    try:
        reply = json.loads(read)
    except ValueError:
        reply = None

    if not isinstance(reply, dict):
        raise http.client.HTTPException(
            f"it returned {answer.status} and no JSON: it is not a sandbox"
        )

    return answer.status, reply
