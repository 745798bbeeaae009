"""SGLang as a rollout engine, over its HTTP interface. Routes that accept pickles are not used."""

import asyncio
import json
import math
import secrets
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from distflow.errors import UserError
from distflow.rollout.engine import GenerateRequest, SamplingParams
from distflow.rollout.random_draws import sample_key
from distflow.rollout.servers.answer_checks import Answer, lie
from distflow.rollout.servers.http_engine import UNLIMITED, HttpEngine, ServerFailed, all_or_none
from distflow.rollout.servers.server_process import WeightFiles, find_package, write_model

_KEY: Final = "actor_rollout_ref.rollout"
_SEEDS: Final = 2**31
HEALTH_S: Final = 10.0


def check_environment(python: str | None) -> None:
    """Raises UserError if SGLang is not installed for an interpreter."""
    if not (found := find_package(python, "sglang")).startswith("sglang=="):
        make = 'python3 -m venv .venv-sglang && .venv-sglang/bin/pip install "sglang[all]"'
        raise UserError(
            f"{_KEY}.name=sglang needs SGLang, and {python or sys.executable} has {found}: install "
            f"it into an environment of its own ({make}), and set "
            f"{_KEY}.python=.venv-sglang/bin/python; or start its server yourself, and set "
            f"{_KEY}.url"
        )


@dataclass(eq=False)
class SGLangEngine(HttpEngine):
    """An answer of SGLang names a single weight version, so running requests are aborted at an
    update, and sent again with their tokens so far: each part has one version, and keys and values
    are always recomputed. A pause without
    an update leaves requests open (`in_place`).

    repeats_draws: whether the server honours the seeds that it receives.
    """

    NAME = "SGLang server"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"kv_on_update": self.kv_on_update})
        self.repeats_draws = False
        self._num_tokens = self._num_aborts = 0
        self._is_in_place = False

        if self.url is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.own_url = f"http://127.0.0.1:{free.getsockname()[1]}"
            self.headers = {"Authorization": f"Bearer {secrets.token_hex()}"}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError for options that SGLang cannot reproduce exactly."""
        if options.get("kv_on_update") == "keep":
            raise UserError(
                f"{_KEY}.kv_on_update=keep: SGLang does not say which weights made which token of "
                "a response: set recompute or abort"
            )

        if "python" in options and not options["url"]:
            check_environment(options["python"])

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        options = {
            "max_running_requests": self.max_num_seqs,
            **self.engine_kwargs,
            "model_path": str(write_model(self.model, self.tokenizer, folder)),
            "load_format": "dummy",  # the weights are loaded as in every update
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "host": "127.0.0.1",
            "port": int(self.own_url.rpartition(":")[2]),
            "api_key": self.headers["Authorization"].partition(" ")[2],
            "enable_memory_saver": self.free_cache_engine,
        }
        file = folder / "sglang.yaml"  # a command line would show the key to other users
        file.write_text(
            json.dumps({name.replace("_", "-"): value for name, value in options.items()})
        )
        env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "HF_HUB_OFFLINE": "1"}

        return [
            self.python or sys.executable,
            "-m",
            "sglang.launch_server",
            "--config",
            str(file),
        ], env

    async def begin(self) -> None:
        if (
            health := await self.client.get("/health", timeout=HEALTH_S)
        ).status_code != httpx.codes.OK:
            raise httpx.RemoteProtocolError(f"/health is answered with {health.status_code}")

        info = await self._get("/server_info")
        model = await self._get("/get_model_info")
        self.repeats_draws = bool(info.get("enable_deterministic_inference"))
        self.max_positions = min(
            self.max_positions, info.get("context_length") or self.max_positions
        )

        if (found := model.get("architectures")) and type(self.model).__name__ not in found:
            raise UserError(
                f"{self.who} has a model {found[0]}, and this run trains a "
                f"{type(self.model).__name__}"
            )
        if self.free_cache_engine and not info.get("enable_memory_saver"):
            raise UserError(
                f"{_KEY}.free_cache_engine: start {self.who} with --enable-memory-saver, or remove "
                "the key"
            )

    async def ask(self, request: GenerateRequest) -> list[Answer]:
        check_params(request.params)
        return await all_or_none(self._respond(request, sample) for sample in request.samples)

    async def _respond(self, request: GenerateRequest, sample: int) -> Answer:
        ids = list[int]()
        rollout = list[float]()
        sampling = list[float]()
        versions = list[str]()
        while True:
            num_aborts = self._num_aborts
            left = request.params.max_tokens - len(ids)
            body = {
                "input_ids": [*request.prompt_ids, *ids],
                "sampling_params": _sampling_params(request, sample, left),
                "return_logprob": True,
                "top_logprobs_num": _num_likeliest(request.params),
            }
            meta = (await self._generate(body))["meta_info"]
            reason = meta["finish_reason"]["type"]
            tokens = meta.get("output_token_logprobs")
            if tokens is None and reason == "abort":  # the request had not begun
                tokens = []
            ids += [token for _, token, *_ in tokens]
            rollout += [log_prob for log_prob, *_ in tokens]
            sampling += _of_draws(meta, request.params) if tokens else []
            versions += [meta["weight_version"]] * len(tokens)
            self._num_tokens += len(tokens)
            if reason != "abort" or self.kv_on_update == "abort" or len(tokens) >= left:
                return Answer(ids, rollout, sampling, versions, reason)
            if num_aborts == self._num_aborts:
                raise ServerFailed(
                    f"{self.who} aborted a request by itself: "
                    f"{meta['finish_reason'].get('message')}"
                )

    async def _generate(self, body: dict[str, Any]) -> Any:
        """Generate; a request cancelled here is aborted on the server."""
        name = uuid.uuid4().hex
        try:
            return await self.post("/generate", {**body, "rid": name}, timeout=UNLIMITED)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._abort(name))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            raise

    async def _abort(self, name: str) -> None:
        if not self.client.is_closed:  # at the end of a run all connections are closed
            with suppress(httpx.HTTPError):
                await self.client.post("/abort_request", json={"rid": name})

    async def halt(self) -> None:
        self._is_in_place = True
        await self.post("/pause_generation", {"mode": "in_place"})

    async def halt_for_update(self) -> None:
        if self._is_in_place:  # without steps only waiting requests can be aborted
            await self.post("/pause_generation", {"mode": "retract"})
            self._is_in_place = False
        self._num_aborts += 1
        await self.post("/pause_generation", {"mode": "abort"})

    async def drop_cache(self) -> None:
        await self.halt_for_update()
        # the answer is not JSON
        if (answer := await self.client.post("/flush_cache")).status_code != httpx.codes.OK:
            raise ServerFailed(f"{self.who} did not flush its cache: {answer.text[:500]}")

    async def sleep(self) -> None:
        await self.post("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self.post("/resume_memory_occupation", {})

    async def go_on(self) -> None:
        await self.post("/continue_generation", {})
        self._is_in_place = False

    async def take(self, files: WeightFiles) -> Mapping[str, str]:
        """SGLang reports no hashes of its weights: these are of the files. The canary detects wrong
        weights."""
        body = {"model_path": str(files.folder), "load_format": "auto", "flush_cache": True}
        answer = await self.post("/update_weights_from_disk", body)
        if not answer["success"]:
            raise ServerFailed(f"{self.who} did not take new weights: {answer['message']}")
        return files.hashes

    async def held_hashes(self) -> Mapping[str, str]:
        return self._held.hashes if self._held is not None else {}

    async def set_label(self, label: str) -> None:
        await self.post(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )
        if (found := (await self._get("/get_model_info"))["weight_version"]) != label:
            raise lie(self.who, f"that it has weights '{found}' instead of '{label}'")

    async def count_tokens(self) -> int:
        info = await self._get("/server_info")  # the scheduler answers between two steps

        # every 40 steps
        measured = [each.get("last_gen_throughput") for each in info.get("internal_states") or ()]
        if measured and None not in measured:
            self._progress = measured
        else:
            self._progress = None

        return self._num_tokens

    async def _get(self, path: str) -> Any:
        if (answer := await self.client.get(path)).status_code >= 500:
            raise httpx.RemoteProtocolError(f"{path} is answered with {answer.status_code}")
        if answer.status_code != httpx.codes.OK:
            raise UserError(
                f"{self.who} answered {path} with {answer.status_code}: is it SGLang, 0.5.5 or "
                "newer?"
            )

        return self.read(answer)


def check_params(params: SamplingParams) -> None:
    """Raises UserError for parameters with which SGLang's log-probs are not exact: it reports them
    after penalties, and those of the draws can be derived only for top-k."""
    neutral = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for name, off in neutral.items():
        if (value := getattr(params, name)) != off:
            raise UserError(
                f"{_KEY}.{name}={value}: SGLang then reports no exact log-probs: remove the key, "
                "or set top_k"
            )


def _sampling_params(request: GenerateRequest, sample: int, max_tokens: int) -> dict[str, Any]:
    params = request.params
    law: dict[str, Any] = {"temperature": params.temperature, "top_k": params.top_k}
    if params.greedy:  # SGLang's greedy reports log-probs at temperature 1
        if params.temperature != 1:
            law = {"temperature": params.temperature, "min_p": 1.0}
        else:
            law = {"temperature": 0.0}

    return {
        **law,
        "max_new_tokens": max_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,  # with it SGLang ignores those as well
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": sample_key(request.stream, sample) % _SEEDS,
    }


def _num_likeliest(params: SamplingParams) -> int:
    return 0 if params.greedy else max(params.top_k, 0)


def _of_draws(meta: Mapping[str, Any], params: SamplingParams) -> list[float]:
    """Log-probs of drawn tokens: under top-k, relative to the mass of the k likeliest."""
    log_probs = [log_prob for log_prob, *_ in meta["output_token_logprobs"]]
    if not _num_likeliest(params):
        return log_probs

    masses = (
        math.fsum(math.exp(each[0]) for each in likeliest)
        for likeliest in meta["output_top_logprobs"]
    )
    return [log_prob - math.log(mass) for log_prob, mass in zip(log_probs, masses, strict=True)]
