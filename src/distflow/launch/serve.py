"""`distflow serve`: the rollout engine of a config behind the endpoint, with the model as it is."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

from distflow.config import Config
from distflow.launch.check_extensions import check_extensions
from distflow.launch.configured_models import policy_context
from distflow.launch.device_and_threads import choose_device, make_process_ready
from distflow.launch.model_and_engine_factories import make_factories
from distflow.launch.spec_settings import sampling_params
from distflow.pipelines.serve_without_run import ServedPolicy, serve_policy
from distflow.planning.plan import RankPlan
from distflow.runtime.spec import Get

LONGEST = 4096


async def serve(config: Config, name: str, key: str, address: tuple[str, int], say: Callable[[str], None]) -> None:
    """Until it is cancelled. name: of the model, for clients. address: host and port. say: is called with the URL.
    Raises UserError."""
    check_extensions(config)
    make_process_ready(config)
    factories = make_factories(config, ("rollout",), (), steps=1)
    factories["policy"] = partial(cast("partial[object]", factories["policy"]), adapt=None, spread=None)
    get = Get(factories, RankPlan(0, str(choose_device(config)), (), (), ("rollout",), ()), {})
    stop_ids, context = tuple(get("stop_token_ids")), policy_context(config) or LONGEST
    async with get("rollout") as engine:
        policy = ServedPolicy(engine, get("tokenizer"), stop_ids, config, sampling_params(config), context)
        with serve_policy(policy, name, key, address) as url:
            say(url)
            await asyncio.Event().wait()
