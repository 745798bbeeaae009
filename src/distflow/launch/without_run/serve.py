"""A config's rollout engine without a run: serves the model (`distflow serve`), or is tested for
all that a run needs (`distflow rollout check`)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from socket import socket

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.config import Config
from distflow.config.keys.schema import with_values
from distflow.launch.check_extensions import check_extensions
from distflow.launch.configured_models import policy_limits
from distflow.launch.devices import choose_device
from distflow.launch.engines import make_factories
from distflow.launch.rollout_engines import engine_dtype
from distflow.launch.run_settings import sampling_params
from distflow.launch.threads import make_process_ready
from distflow.pipelines.serve_without_run import ServedPolicy, serve_policy
from distflow.planning.plan import RankPlan
from distflow.rollout.conformance import Finding, check_engine
from distflow.rollout.engine_bench import Bench
from distflow.runtime.spec import Get

LONGEST = 4096
NUM_PROMPTS = 200
EXACT = 1e-4


async def serve(
    config: Config, name: str, key: str, listening: socket, say: Callable[[str], None]
) -> None:
    """Serve until cancelled. name: of the model, for clients. say: called with the URL. Raises
    UserError."""
    get = _resources(config)
    stop_ids = tuple(get("stop_token_ids"))
    context = policy_limits(config).context or LONGEST

    async with get("rollout") as engine:
        policy = ServedPolicy(
            engine, get("tokenizer"), stop_ids, config, sampling_params(config), context
        )
        with serve_policy(policy, name, key, listening) as url:
            say(url)
            await asyncio.Event().wait()


async def check_rollout(config: Config) -> AsyncIterator[Finding]:
    """Check the engine as a run builds it, with its own weights."""
    get = _resources(config)
    dtype = engine_dtype(config)
    room = config.data.max_prompt_length + config.data.max_response_length

    if dtype is torch.float32:
        limit = EXACT
    else:
        limit = Tolerance.of(exact=False).hold

    longest = min(room, policy_limits(config).context or room)
    async with get("rollout") as engine:
        bench = Bench(
            engine, get("policy").eval(), get("tokenizer"), longest, limit, dtype, NUM_PROMPTS
        )
        async for found in check_engine(bench):
            yield found


def _resources(config: Config) -> Get:
    """The parts, without a configured adapter."""
    check_extensions(config)
    make_process_ready(config)
    whole = with_values(config, {"actor_rollout_ref.model.lora_rank": 0})
    factories = make_factories(whole, ("rollout",), (), steps=1)
    return Get(factories, RankPlan(0, str(choose_device(config)), (), (), ("rollout",), ()), {})
