"""`distflow rollout check`: the rollout engine of a config against the model of the config."""

from collections.abc import AsyncIterator
from functools import partial
from typing import cast

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.config import Config
from distflow.launch.check_extensions import check_extensions
from distflow.launch.configured_models import policy_context
from distflow.launch.device_and_threads import choose_device, make_process_ready
from distflow.launch.model_and_engine_factories import engine_dtype, make_factories
from distflow.planning.plan import RankPlan
from distflow.rollout.conformance import Bench, Finding, check_engine
from distflow.runtime.spec import Get

NUM_PROMPTS = 200
EXACT = 1e-4


async def check_rollout(config: Config) -> AsyncIterator[Finding]:
    """The engine as a run builds it, on weights of its own. A model that is to get an adapter is checked without."""
    check_extensions(config)
    make_process_ready(config)
    factories = make_factories(config, ("rollout",), (), steps=1)
    policy, rollout = (cast("partial[object]", factories[name]) for name in ("policy", "rollout"))
    factories["policy"] = partial(policy, adapt=None, spread=None)
    factories["rollout"] = partial(rollout, **{"shares": False} if "shares" in rollout.keywords else {})
    get = Get(factories, RankPlan(0, str(choose_device(config)), (), (), ("rollout",), ()), {})
    dtype, room = engine_dtype(config), config.data.max_prompt_length + config.data.max_response_length
    limit = EXACT if dtype is torch.float32 else Tolerance.of(exact=False).hold
    longest = min(room, policy_context(config) or room)
    async with get("rollout") as engine:
        bench = Bench(engine, get("policy").eval(), get("tokenizer"), longest, limit, dtype, NUM_PROMPTS)
        async for found in check_engine(bench):
            yield found
