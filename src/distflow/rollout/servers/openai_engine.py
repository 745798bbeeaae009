"""Any server with OpenAI's completions route that takes and returns token ids, such as vLLM's and
SGLang's. Only for evaluation: it cannot load weights."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from torch import Tensor

from distflow.errors import UserError
from distflow.rollout.engine import GenerateRequest, WeightReceipt
from distflow.rollout.random_draws import sample_key
from distflow.rollout.servers.answer_checks import Answer, label_of, lie
from distflow.rollout.servers.http_engine import UNLIMITED, HttpEngine, all_or_none
from distflow.scheduling.group_states import Version

_KEY: Final = "actor_rollout_ref.rollout"
_SEEDS: Final = 2**31
_AS_ID: Final = "token_id:"


@dataclass(eq=False)
class OpenAIEngine(HttpEngine):
    """Log-probs are as reported by the server: those of vLLM and SGLang are at temperature 1,
    without truncations. A pause holds back unsent requests."""

    NAME = "OpenAI-compatible server"
    repeats_draws = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.url = (self.url or "").rstrip("/").removesuffix("/v1")
        if key := os.environ.get("OPENAI_API_KEY"):
            self.headers = {"Authorization": f"Bearer {key}"}
        self._num_tokens = 0
        self._may_ask = asyncio.Event()
        self._may_ask.set()

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        if len(options["url"]) != 1:
            raise UserError(
                f"{_KEY}.name=openai needs the address of one server: set "
                f"{_KEY}.url=http://HOST:PORT"
            )

    def command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        raise AssertionError("it has an address")

    async def begin(self) -> None:
        answer = await self.client.get("/v1/models")
        if answer.status_code >= 500:
            raise httpx.RemoteProtocolError(f"/v1/models is answered with {answer.status_code}")
        if answer.status_code != httpx.codes.OK:
            raise UserError(
                f"{self.who} answered /v1/models with {answer.status_code}: {answer.text[:200]}"
            )
        models = {str(each["id"]): each for each in self.read(answer)["data"]}
        self._model = self._choose(list(models))
        self.max_positions = min(
            self.max_positions, models[self._model].get("max_model_len") or self.max_positions
        )
        choice = await self._complete({"prompt": [0], "max_tokens": 1, "temperature": 0.0})
        if _ids_of(choice) is None or not choice.get("logprobs"):
            raise UserError(
                f"{self.who} returns no token ids or no log-probs: it needs what vLLM (0.10.2 or "
                "newer) does by "
                "'return_token_ids', or 'return_tokens_as_token_ids'"
            )

    def _choose(self, names: list[str]) -> str:
        own = str(getattr(self.config, "_name_or_path", ""))
        found = [name for name in names if name == own or len(names) == 1]
        if not found:
            raise UserError(
                f"{self.who} serves the models {', '.join(names)}, but not this run's "
                f"{own or 'model'}"
            )
        return found[0]

    async def _complete(
        self, body: Mapping[str, Any], timeout: httpx.Timeout | None = None
    ) -> Mapping[str, Any]:
        asked = {
            "model": self._model,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        (choice,) = (await self.post("/v1/completions", {**asked, **body}, timeout=timeout))[
            "choices"
        ]
        return dict(choice)

    async def ask(self, request: GenerateRequest) -> list[Answer]:
        await self._may_ask.wait()
        return await all_or_none(self._respond(request, sample) for sample in request.samples)

    async def _respond(self, request: GenerateRequest, sample: int) -> Answer:
        params = request.params
        law = (
            {}
            if params.greedy
            else {name: getattr(params, name) for name in ("top_k", "top_p", "min_p")}
        )
        choice = await self._complete(
            {
                **law,
                "prompt": list(request.prompt_ids),
                "max_tokens": params.max_tokens,
                "temperature": 0.0 if params.greedy else params.temperature,
                "repetition_penalty": params.repetition_penalty,
                "seed": sample_key(request.stream, sample) % _SEEDS,
                "stop": list(params.stop),
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": not params.stop_token_ids,  # with it SGLang ignores those too
                "include_stop_str_in_output": True,
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            UNLIMITED,
        )
        if choice.get("prompt_token_ids") not in (None, list(request.prompt_ids)):
            raise lie(self.who, "for a prompt other than the requested one")
        ids = _ids_of(choice)
        log_probs = list(choice["logprobs"]["token_logprobs"])
        if ids is None:
            raise KeyError("token_ids")
        self._num_tokens += len(ids)
        return Answer(
            ids, log_probs, log_probs, [label_of(self.version)] * len(ids), choice["finish_reason"]
        )

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """Only sets the version. Raises UserError for weights."""
        if weights is not None and next(iter(weights), None) is not None:
            await self._refuse()
        self.version = version
        return WeightReceipt(version, version_only=True)

    async def halt(self) -> None:
        self._may_ask.clear()

    drop_cache = halt

    async def go_on(self) -> None:
        self._may_ask.set()

    async def count_tokens(self) -> int:
        await self.client.get("/v1/models")
        return self._num_tokens

    async def held_hashes(self) -> dict[str, str]:
        return {}

    async def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"{_KEY}.name=openai: a server of completions takes no weights")

    halt_for_update = take = set_label = sleep = wake = _refuse


def _ids_of(choice: Mapping[str, Any]) -> list[int] | None:
    """Its token ids, or those given in place of token strings."""
    if (ids := choice.get("token_ids")) is not None:
        return list(ids)
    tokens = (choice.get("logprobs") or {}).get("tokens") or []
    if not tokens or not all(str(each).startswith(_AS_ID) for each in tokens):
        return None
    return [int(str(each).removeprefix(_AS_ID)) for each in tokens]
