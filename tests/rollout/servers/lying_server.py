"""A small server with the routes of vLLM, SGLang and OpenAI, which lies where it is told to: what a
client must not believe."""

import json
import threading
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from safetensors.torch import load_file

from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.servers.vllm_engine import INTERFACE

VOCAB_SIZE = 99
Lie = Callable[[str, dict[str, Any], Any], Any]
"""(path, what was asked, true answer) → what is answered: an object, bytes, a status, or None for a
lost connection."""


def honest(path: str, asked: dict[str, Any], answer: Any) -> Any:
    return answer


def name_of(asked: dict[str, Any]) -> str:
    """Under which a request's log-probs are kept."""
    return str(asked["sampling_params"]["extra_args"]["distflow"]["name"])


class Server(ThreadingHTTPServer):
    """lie: may be changed while it runs. label, hashes: of the weights that it says it has."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lie: Lie = honest
        self.label = "default"
        self.hashes = dict[str, str]()
        self.asked: list[tuple[str, dict[str, Any]]] = []

        # three numbers per token of each sample, by the request's name
        self.drawn = dict[str, list[list[float]]]()
        self.released = threading.Event()  # what stalls ends then

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        """The truth."""
        if path == "/collective_rpc" and asked["method"] == "distflow_describe":
            described = {
                "interface": INTERFACE,
                "dtype": "torch.float32",
                "vocab_size": VOCAB_SIZE,
                "max_model_len": 256,
                "can_sleep": False,
                "held": bool(self.hashes),
            }
            return {"results": [described]}

        if path == "/collective_rpc" and asked["method"] == "distflow_load":
            self.hashes = {}
            for file in asked["args"][0]:
                self.hashes |= stripe_hashes(load_file(file).items())

        if path == "/collective_rpc" and asked["method"] == "distflow_take_drawn":
            drawn = [self.drawn.pop(name)[:number] for name, number in asked["args"][0].items()]
            return {
                "results": [
                    [[b64encode(array("d", each)).decode() for each in one] for one in drawn]
                ]
            }
        if path == "/collective_rpc" and asked["method"] == "distflow_count":
            return {"results": ["0"]}
        if path == "/collective_rpc":
            return {"results": [self.hashes]}
        if path == "/reset_prefix_cache":
            return {"success": True}

        if path == "/update_weight_version":
            self.label = asked["new_version"]
        if path == "/v1/models":
            return {"data": [{"id": "policy"}]}

        if path == "/v1/completions":
            length = asked["max_tokens"]
            log_probs = {"token_logprobs": [-1.0] * length}
            return {
                "choices": [
                    {"token_ids": [7] * length, "logprobs": log_probs, "finish_reason": "length"}
                ]
            }

        if path == "/get_model_info":
            return {"weight_version": self.label}
        if path == "/update_weights_from_disk":
            return {"success": True}

        if path == "/generate":
            tokens = [[-1.0, 7, None] for _ in range(asked["sampling_params"]["max_new_tokens"])]
            end = {"finish_reason": {"type": "length"}, "weight_version": self.label}
            return {"meta_info": {**end, "output_token_logprobs": tokens}}

        if path == "/inference/v1/generate":
            length = asked["sampling_params"]["max_tokens"]
            params = asked["sampling_params"]
            choices = [self._choice(index, length) for index in range(params["n"])]
            self.drawn[name_of(asked)] = [[7, -1.0, -0.5] * length for _ in choices]
            return {"choices": choices, "prompt_token_ids": asked["token_ids"]}

        return {}

    def _choice(self, index: int, length: int) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": [7] * length,
            "weight_versions": [{"version": self.label, "start": 0, "end": length}],
            "finish_reason": "length",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.asked.append((path, asked))
        answer = self.server.lie(path, asked, self.server.answer(path, asked))
        if answer is None:
            self.close_connection = True
            return

        status = answer if isinstance(answer, int) else 200
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
