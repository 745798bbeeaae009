"""SGLang's HTTP interface over our embedded engine, written from its documentation and its source
(0.5): what a client of ours asks of it. As a program it takes the place of
`python -m sglang.launch_server --config FILE`.

A lie makes it wrong in one way, see `LIES`.
"""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from distflow.data.sample import Segment
from distflow.models.loading import load_tokenizer
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from distflow.scheduling.group_states import Version

LIES = {
    "error": "answers 500",
    "garbage": "answers what is no JSON",
    "other form": "answers without what was asked for",
    "other tokens": "answers tokens that the model does not have",
    "too short": "ends a response early",
    "no log-probs": "leaves log-probs out",
    "one log-prob": "leaves one log-prob out",
    "NaN": "answers null for a log-prob",
    "above 0": "answers log-probs of more than 1",
    "older label": "names an older version of the weights in its answers",
    "keeps its label": "does not take the name of a version",
    "keeps its weights": "says that it has new weights, and serves the old",
    "refuses": "does not take new weights",
    "aborts": "aborts requests by itself",
    "dies": "dies in an update",
    "stalls": "does not answer any more",
    "never answers": "is well, and answers no request for tokens",
    "updates later": "is well, and has no new weights as long as it lies",
    "other prompt": "answers another prompt than it was asked",
    "ignores top_k": "draws from the whole vocabulary",
    "draws colder": "draws at another temperature than that of its log-probs",
    "older interface": "lacks a route",
}
Json = dict[str, Any]


class Refused(Exception):
    """(status, what is wrong)"""


class SGLang:
    """The server's state. Only the event loop of its thread uses it, but for `lie`. later: the lie
    that begins when the server has its first weights."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, **args: Any) -> None:
        self.model = model
        self.args = args
        self.lie = ""
        self.later = ""

        # New weights abort: with the weights that it has, that is how it aborts all that has begun.
        self.engine = EmbeddedEngine(
            model,
            tokenizer,
            version=Version(0, 0),
            kv_on_update="abort",
            max_num_seqs=64,
            batch_invariant=bool(args.get("batch_invariant")),
        )
        self.label = "default"
        self.paused = False
        self.num_updates = 0
        self.is_in_place = self.is_halted = False
        self.modes = list[str]()
        self.open: dict[str, asyncio.Task[Segment | None]] = {}
        self.asked: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.loop = asyncio.new_event_loop()
        self.resumed = asyncio.Event()
        self.resumed.set()

    async def generate(self, body: Json) -> Json:
        while self.paused or self.lie == "never answers":
            await (self.resumed if self.paused else asyncio.Event()).wait()
        ids = tuple(body["input_ids"])
        wanted = dict(body["sampling_params"])
        self.prompts.append(ids)
        ids = (ids[0] % 90 + 1, *ids[1:]) if self.lie == "other prompt" else ids
        stops = (
            ()
            if wanted["ignore_eos"]
            else (*wanted["stop_token_ids"], self.model.config.eos_token_id)
        )
        heat = wanted["temperature"]
        params = SamplingParams(
            max_tokens=wanted["max_new_tokens"],
            temperature=(heat or 1.0) * (0.6 if self.lie == "draws colder" else 1.0),
            greedy=heat == 0,
            top_k=wanted.get("top_k", -1) if self.lie != "ignores top_k" else -1,
            top_p=wanted.get("top_p", 1.0),
            min_p=wanted.get("min_p", 0.0),
            stop=tuple(wanted["stop"]),
            stop_token_ids=stops,
        )
        seed = (
            wanted["sampling_seed"]
            if self.args.get("enable_deterministic_inference")
            else time.monotonic_ns()
        )
        request = GenerateRequest(
            ids, (0,), params, Stream(seed, "sglang", 0, 0), num_drawn=len(ids)
        )
        name = body["rid"]
        self.open[name] = asyncio.ensure_future(self._run(request))

        likeliest = None
        try:
            found = await asyncio.shield(self.open[name])
            if self.lie == "draws colder":
                found = replace(found, rollout_log_probs=self._log_probs(ids, found, heat or 1.0))
            # on another thread: this one has to answer whoever asks whether all is well
            if body["top_logprobs_num"]:
                likeliest = await asyncio.to_thread(self._likeliest, body, ids, params, found)
        except asyncio.CancelledError:
            found = None
        finally:
            self.open.pop(name, None)

        if found is None or self.lie == "aborts":
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            return {
                "output_ids": [],
                "meta_info": {"id": name, "finish_reason": reason, "weight_version": self.label},
            }

        return self._answer(body, found, likeliest)

    async def _run(self, request: GenerateRequest) -> Segment:
        return (await self.engine.generate(request))[0]

    def _likeliest(
        self, body: Json, ids: tuple[int, ...], params: SamplingParams, found: Segment
    ) -> Any:
        scores = self._scores(ids, found, params.temperature)
        top = scores.topk(body["top_logprobs_num"])
        rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [[[p, t, None] for p, t in zip(*row, strict=True)] for row in rows]

    @torch.no_grad()
    def _scores(self, ids: tuple[int, ...], found: Segment, heat: float) -> torch.Tensor:
        whole = torch.tensor([[*ids, *found.token_ids]])
        scores: torch.Tensor = self.model(whole).logits[0, len(ids) - 1 : -1]
        return scores.div(heat).log_softmax(-1)

    def _log_probs(self, ids: tuple[int, ...], found: Segment, heat: float) -> list[float]:
        return (
            self._scores(ids, found, heat)
            .gather(-1, torch.tensor(found.token_ids)[:, None])[:, 0]
            .tolist()
        )

    def _answer(self, body: Json, found: Segment, likeliest: Any) -> Json:
        tokens = list(found.token_ids)
        log_probs = list[float | None](found.rollout_log_probs)
        if self.lie == "other tokens":
            tokens[-1] = 10**6

        if self.lie == "too short":
            tokens = tokens[:1]
            log_probs = log_probs[:1]

        if self.lie == "NaN":
            log_probs[0] = None
        if self.lie == "above 0":
            log_probs[0] = 0.5
        meta: Json = {
            "id": body["rid"],
            "finish_reason": {"type": found.finish_reason},
            "weight_version": "default" if self.lie == "older label" else self.label,
            "output_token_logprobs": [
                [number, token, None] for number, token in zip(log_probs, tokens, strict=True)
            ],
        }
        if self.lie == "no log-probs":
            del meta["output_token_logprobs"]
        if self.lie == "one log-prob":
            meta["output_token_logprobs"][0] = meta["output_token_logprobs"][0][1:]
        if likeliest is not None:
            meta["output_top_logprobs"] = likeliest
        return (
            {"output_ids": tokens, "meta_info": meta}
            if self.lie != "other form"
            else {"tokens": tokens}
        )

    async def pause_generation(self, body: Json) -> Json:
        self.modes.append(body["mode"])
        self.paused = True
        self.resumed.clear()
        self.is_in_place = body["mode"] == "in_place" or (
            self.is_in_place and body["mode"] == "abort"
        )

        if body["mode"] != "abort":
            self.is_halted = True
            await self.engine.pause()
            return {"status": "ok", "message": "Generation paused successfully."}

        # for ever, as there: running requests end in steps alone
        while self.is_in_place and self.open:
            await asyncio.sleep(0.01)
        await self._load(dict(self.model.named_parameters()))
        for task in list(self.open.values()):
            task.cancel()
        while self.open:
            await asyncio.sleep(0.001)
        return {"status": "ok", "message": "Generation paused successfully."}

    async def continue_generation(self, body: Json) -> Json:
        if self.is_halted:
            self.is_halted = self.is_in_place = False
            await self.engine.resume()
        self.paused = False
        self.resumed.set()
        return {"status": "ok", "message": "Generation continued successfully."}

    async def abort_request(self, body: Json) -> Json:
        for name, task in list(self.open.items()):
            if body.get("abort_all") or name == body["rid"]:
                task.cancel()
        return {}

    async def update_weights_from_disk(self, body: Json) -> Json:
        if self.lie == "dies":
            os._exit(1)
        while self.lie == "updates later":
            await asyncio.sleep(0.01)
        assert not self.open and body["flush_cache"] and body["load_format"] == "auto"

        if self.lie == "refuses":
            raise Refused(
                400,
                {
                    "success": False,
                    "message": "Failed to get weights iterator",
                    "num_paused_requests": 0,
                },
            )

        if self.lie != "keeps its weights":
            weights = {
                n: w
                for file in sorted(Path(body["model_path"]).iterdir())
                for n, w in load_file(file).items()
            }
            try:
                await self._load(weights)
            except ValueError as err:
                raise Refused(
                    400, {"success": False, "message": f"Failed to update weights: {err}"}
                ) from err

        if self.later:
            self.lie = self.later
            self.later = ""

        return {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }

    async def _load(self, weights: dict[str, Any]) -> None:
        self.num_updates += 1
        copies = [(name, weight.detach().clone()) for name, weight in weights.items()]
        await self.engine.load_weights(Version(0, self.num_updates), copies)

    async def update_weight_version(self, body: Json) -> Json:
        assert not body["abort_all_requests"]
        if self.lie != "keeps its label":
            self.label = body["new_version"]
        return {
            "success": True,
            "message": "Weight version updated",
            "new_version": body["new_version"],
        }

    async def get_weight_version(self, body: Json) -> Json:
        return {"weight_version": self.label}

    async def get_model_info(self, body: Json) -> Json:
        named = {
            "model_path": self.args.get("model_path", ""),
            "tokenizer_path": "",
            "is_generation": True,
        }
        return {**named, "weight_version": self.label, "architectures": [type(self.model).__name__]}

    async def server_info(self, body: Json) -> Json:
        if self.lie == "older interface":
            raise Refused(404, {"detail": "Not Found"})
        state = {"last_gen_throughput": float(self.engine.num_generated_tokens)}
        return {**self.args, "api_key": None, "internal_states": [state], "version": "0.5.6"}

    async def health(self, body: Json) -> Json:
        return {}

    health_generate = health

    async def flush_cache(self, body: Json) -> str:
        return "Cache flushed.\nPlease check backend logs for more details."

    async def release_memory_occupation(self, body: Json) -> Json:
        if not self.args.get("enable_memory_saver"):
            raise Refused(400, "memory saver is not enabled")
        await self.engine.pause(release=True)
        return {}

    async def resume_memory_occupation(self, body: Json) -> Json:
        """The weights are garbage until the next update."""
        await self._load(
            {name: torch.full(w.shape, 7.0) for name, w in self.model.named_parameters()}
        )
        await self.engine.resume()
        return {}


GET = ("get_weight_version", "get_model_info", "server_info", "health", "health_generate")


class Running:
    """A server on a thread of this process.
    `with Running(model, tokenizer) as server: server.url`"""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, **args: Any) -> None:
        self.state = SGLang(model, tokenizer, **args)
        self._socket = socket.create_server(
            (args.get("host", "127.0.0.1"), args.get("port", 0)), backlog=1024
        )
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> "Running":
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._thread.start()
        self._do(self.state.engine.__aenter__())
        self._server = self._do(asyncio.start_server(self._serve, sock=self._socket))
        return self

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.state.loop)
        self.state.loop.run_forever()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.state.loop).result()

    def __exit__(self, *exception: object) -> None:
        self._do(self._end())
        self._do(self.state.engine.__aexit__(*exception))
        self.state.loop.call_soon_threadsafe(self.state.loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        self._server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=0.1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of a connection. A client that has cancelled a request closes it."""
        with (
            closing(writer),
            suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError),
        ):
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = dict[str, str]()
                while header := (await reader.readline()).decode().strip():
                    name, _, headers[name.lower()] = header.partition(": ")
                body = json.loads(
                    await reader.readexactly(int(headers.get("content-length", 0))) or b"{}"
                )
                name = path[1:].removeprefix("v1/")
                is_known = (name in GET) == (method == "GET")
                status, text = await self._reply(name if is_known else "", body, headers)
                writer.write(
                    f"HTTP/1.1 {status} -\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
                )
                await writer.drain()

    async def _reply(self, name: str, body: Json, headers: dict[str, str]) -> tuple[int, bytes]:
        state = self.state
        status = 200
        work: Callable[[Json], Any] | None = (
            getattr(state, name, None) if name and name[0] != "_" else None
        )
        if state.lie == "stalls":
            await asyncio.Event().wait()

        if (key := state.args.get("api_key")) and headers.get("authorization") != f"Bearer {key}":
            status = 401
            answer = {"error": "Unauthorized"}
        elif work is None:
            status = 404
            answer = {"detail": "Not Found"}
        elif state.lie == "error" and name != "health":
            status = 500
            answer = {"error": "CUDA error: an illegal memory access was encountered"}
        else:
            state.asked.append(name)
            try:
                answer = await work(body)
            except Refused as refused:
                status, answer = refused.args

        text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        return status, b"<html>Bad Gateway" if state.lie == "garbage" else text


def main() -> None:
    """`... --config FILE`, whose options are SGLang's."""
    file = Path(sys.argv[sys.argv.index("--config") + 1])
    args = {name.replace("-", "_"): value for name, value in json.loads(file.read_text()).items()}
    assert args["load_format"] == "dummy"
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(args["model_path"])

    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args["dtype"])).eval()
    with Running(model, load_tokenizer(args["model_path"]), **args) as server:
        server.state.lie, server.state.later = (
            os.environ.get(name, "") for name in ("SGLANG_LIE", "SGLANG_LIE_LATER")
        )
        threading.Event().wait()


if __name__ == "__main__":
    main()
