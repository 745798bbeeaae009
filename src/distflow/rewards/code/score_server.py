"""`distflow sandbox serve`: an HTTP server that scores programs for reward functions on other
machines. A request has a response with its row's tests, and the reply has the result, in JSON."""

import json
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server, socket
from typing import Any

from distflow.errors import UserError
from distflow.http_guard import Door, Guard, Refused, is_loopback, new_token, token_for_this_user
from distflow.rewards.code.reward import score_program
from distflow.rewards.code.score_client import PATH, TOKEN
from distflow.rewards.reward_results import due_within
from distflow.sandbox.interface import SandboxFault
from distflow.sandbox.local_sandbox import Sandbox

MAX_BODY_BYTES = 64 * 2**20
_MAX_CONNECTIONS = 256
_SLOT_S = 5.0
_SOCKET_S = 150.0
_BODY_S = 5.0
"""For the next part of a body."""


class ScoreServer(ThreadingHTTPServer):
    """Use as `with ScoreServer(...) as server: server.serve_forever()`; `server_address` has its
    port."""

    daemon_threads = True

    def __init__(self, sandbox: Sandbox, at_once: int, host: str, port: int, token: str) -> None:
        """at_once: the number of responses that are scored at a time. token: empty for a random
        one, which clients of this user find on this machine. Raises UserError if clients on other
        machines would have to know a random one, or if the port is in use."""
        if not (token or is_loopback(host)):
            raise UserError(
                f"at {host} other machines can run programs: set {TOKEN} to the same password on "
                "both sides"
            )

        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self._sandbox = sandbox
        self._free = threading.BoundedSemaphore(at_once)
        self._kept_token = ExitStack()

        try:
            listening = create_server((host, port), family=AF_INET6 if ":" in host else AF_INET)
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            raise UserError(
                f"{host}:{port} cannot be listened on: {getattr(error, 'strerror', error)}"
            ) from None

        self.socket = Door(listening, _MAX_CONNECTIONS)
        self.server_address = listening.getsockname()
        self.token_file: Path | None = None

        if not token:
            token = new_token()
            self.token_file = self._kept_token.enter_context(
                token_for_this_user(self.server_address[1], token)
            )

        self.guard = Guard(host, token, MAX_BODY_BYTES)

    def score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`result`, or `error` for tests that are broken. Raises Refused, SandboxFault."""
        response = request.get("response")
        row = request.get("row")
        seconds = request.get("seconds")
        if not isinstance(response, str) or not isinstance(row, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request has a response and a row")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise Refused(HTTPStatus.BAD_REQUEST, "a request says how many seconds it has")
        if not self._free.acquire(timeout=_SLOT_S):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "all places are taken")

        try:
            with due_within(seconds):
                return {
                    "result": score_program(
                        self._sandbox, response, request.get("ground_truth"), row
                    )
                }
        except (ValueError, TimeoutError) as error:
            return {"error": str(error)}
        finally:
            self._free.release()

    def server_close(self) -> None:
        super().server_close()
        self._kept_token.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client is gone, so there is nobody to report to."""


class _Handler(BaseHTTPRequestHandler):
    server: ScoreServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _SOCKET_S
    connection: socket

    def parse_request(self) -> bool:
        """Refuse what the guard refuses, whatever its method."""
        if not super().parse_request():
            return False

        headers = [(name.lower(), value) for name, value in self.headers.items()]
        try:
            self.server.guard.check(self.command, self.path, headers)
        except Refused as refused:
            self.close_connection = True
            self._reply(refused.status, refused.body())
            return False

        return True

    def do_POST(self) -> None:
        try:
            request = self._request()
            self._reply(HTTPStatus.OK, json.dumps(self.server.score(request)).encode())
        except Refused as refused:
            # The rest of a body that was not read would be taken for the next request.
            self.close_connection = refused.status != HTTPStatus.SERVICE_UNAVAILABLE
            self._reply(refused.status, refused.body())
        except SandboxFault as fault:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._reply(status, Refused(status, str(fault)).body())

    def _request(self) -> Mapping[str, Any]:
        if self.path.rpartition(PATH)[2]:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is only {PATH}")

        length = self.headers.get("Content-Length")
        if length is None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a request says how long it is")

        self.connection.settimeout(_BODY_S)
        sent = self.rfile.read(int(length))
        self.connection.settimeout(_SOCKET_S)

        try:
            request = json.loads(sent)
        except (ValueError, RecursionError):
            request = None

        if not isinstance(request, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request is a JSON object")
        return request

    def _reply(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests: programs may be private."""
