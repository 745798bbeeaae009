"""A model behind the endpoint, without a run: each call is a separate conversation."""

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from socket import socket

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.sample import Segment
from distflow.environments.chat import Chat, Limits
from distflow.environments.conversations import Conversations
from distflow.environments.endpoint import Endpoint
from distflow.environments.endpoint_calls import Answer, Call
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.pipelines.nodes.workflow_rollout import template_kwargs
from distflow.rollout.engine import (
    GenerateRequest,
    RolloutEngine,
    SamplingParams,
    Stream,
    generate_whole,
)


class ServedPolicy:
    """Must be created on the engine's event loop. params: defaults for calls. context: in
    tokens."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        config: Config,
        params: SamplingParams,
        context: int,
    ) -> None:
        self._tokens = TurnTokens(tokenizer, stop_ids, template_kwargs(config, ""))
        self._engine = engine
        self._limits = Limits(context, context)
        self._loop = asyncio.get_running_loop()
        self._params = replace(params, stop_token_ids=tuple(stop_ids))
        self._seed = secrets.randbits(62)
        self._numbers = itertools.count()

    def submit(self, call: Call) -> "Future[Answer]":
        """Submit a call from any thread."""
        return asyncio.run_coroutine_threadsafe(self._answer(call), self._loop)

    async def _answer(self, call: Call) -> Answer:
        params = self._params
        seed = call.seed

        if call.temperature is not None:
            params = replace(
                params, greedy=call.temperature == 0, temperature=call.temperature or 1.0
            )

        if call.top_p:
            params = replace(params, top_p=min(call.top_p, 1.0))

        if seed is None:
            stream = Stream(self._seed, "serve", 0, next(self._numbers))
        else:
            stream = Stream(seed, "seed", 0, 0)

        async def generate(
            prompt: tuple[int, ...], most: int, stop: tuple[str | int, ...], num_drawn: int
        ) -> Segment:
            texts = (text for text in stop if isinstance(text, str))
            own = replace(params, max_tokens=most, stop=(*params.stop, *texts))
            request = GenerateRequest(prompt, (0,), own, stream, num_drawn, may_continue=True)
            (drawn,) = await generate_whole(self._engine.generate, request)
            return drawn

        chat = Chat(self._tokens, generate, self._limits, templated=True)
        return await Conversations(chat, None, max_calls=1).answer(call)


@contextmanager
def serve_policy(policy: ServedPolicy, name: str, key: str, listening: socket) -> Iterator[str]:
    """Yields the URL."""
    endpoint = Endpoint(listening)
    try:
        endpoint.serve(key, policy.submit, name)
        yield endpoint.url
    finally:
        endpoint.close()
