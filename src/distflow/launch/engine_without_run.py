"""The rollout engine of a config without a run: with the model as it is, behind the endpoint (`distflow serve`), or
tried on all that a run expects of it (`distflow rollout check`)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import cast

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.config import Config
from distflow.launch.check_extensions import check_extensions
from distflow.launch.configured_models import policy_context
from distflow.launch.device_and_threads import choose_device, make_process_ready
from distflow.launch.model_and_engine_factories import engine_dtype, make_factories
from distflow.launch.spec_settings import sampling_params
from distflow.pipelines.serve_model import ServedPolicy, serve_policy
from distflow.planning.plan import RankPlan
from distflow.rollout.conformance import Bench, Finding, check_engine
from distflow.runtime.spec import Get

LONGEST = 4096
NUM_PROMPTS = 200
EXACT = 1e-4


async def serve(config: Config, name: str, key: str, address: tuple[str, int], say: Callable[[str], None]) -> None:
    """Until it is cancelled. name: of the model, for clients. address: host and port. say: is called with the URL.
    Raises UserError."""
    get = _resources(config)
    stop_ids, context = tuple(get("stop_token_ids")), policy_context(config) or LONGEST
    async with get("rollout") as engine:
        policy = ServedPolicy(engine, get("tokenizer"), stop_ids, config, sampling_params(config), context)
        with serve_policy(policy, name, key, address) as url:
            say(url)
            await asyncio.Event().wait()


async def check_rollout(config: Config) -> AsyncIterator[Finding]:
    """The engine as a run builds it, on weights of its own."""
    get = _resources(config, shares=False)
    dtype, room = engine_dtype(config), config.data.max_prompt_length + config.data.max_response_length
    limit = EXACT if dtype is torch.float32 else Tolerance.of(exact=False).hold
    longest = min(room, policy_context(config) or room)
    async with get("rollout") as engine:
        bench = Bench(engine, get("policy").eval(), get("tokenizer"), longest, limit, dtype, NUM_PROMPTS)
        async for found in check_engine(bench):
            yield found


def _resources(config: Config, **options: bool) -> Get:
    """A model that is to get an adapter is used without. options: of the engine's factory, where it has them."""
    check_extensions(config)
    make_process_ready(config)
    factories = make_factories(config, ("rollout",), (), steps=1)
    policy, rollout = (cast("partial[object]", factories[name]) for name in ("policy", "rollout"))
    factories["policy"] = partial(policy, adapt=None, spread=None)
    factories["rollout"] = partial(rollout, **{name: options[name] for name in options.keys() & rollout.keywords})
    return Get(factories, RankPlan(0, str(choose_device(config)), (), (), ("rollout",), ()), {})
