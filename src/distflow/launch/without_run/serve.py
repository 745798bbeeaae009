"""A config's rollout engine without a run: serves the model (`distflow serve`), also for training
loops of others (`--tinker`), or is tested for all that a run needs (`distflow rollout check`)."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from socket import socket

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError
from distflow.launch.check_extensions import check_extensions
from distflow.launch.configured_models import (
    compute_dtype,
    load_policy_tokenizer,
    policy_limits,
    policy_source,
)
from distflow.launch.devices import choose_device
from distflow.launch.engines import make_factories
from distflow.launch.rollout_engines import (
    cast_weights,
    engine_dtype,
    make_engine,
    policy_engine_options,
)
from distflow.launch.run_settings import sampling_params
from distflow.launch.threads import make_process_ready
from distflow.models.loading import load_model, stop_token_ids
from distflow.models.lora import require_peft
from distflow.models.model_paths import resolve_path
from distflow.models.row_adapters import make_row_adaptable
from distflow.pipelines.serve_without_run import ServedPolicy, serve_policy
from distflow.planning.plan import RankPlan
from distflow.rollout.conformance import Finding, check_engine
from distflow.rollout.engine import RolloutEngine
from distflow.rollout.engine_bench import Bench
from distflow.runtime.spec import Get
from distflow.tinker.adapter import SharedBase, TrainedAdapter, with_weights
from distflow.tinker.model_memory import ModelMemory, max_model_bytes
from distflow.tinker.sampler import Samplers
from distflow.tinker.server import TinkerServer
from distflow.tinker.service import BaseModel
from distflow.training.engine import Collective

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


async def serve_tinker(
    base: BaseModel, key: str, listening: socket, folder: Path, say: Callable[[], None]
) -> None:
    """Serve the Tinker API until cancelled. folder: of the checkpoints. say: called when it
    listens. Raises UserError."""
    host = listening.getsockname()[0]
    server = TinkerServer(base, folder, key, host)
    say()
    await server.serve(listening)


def base_model(
    config: Config,
    name: str,
    folder: Path,
    group: Collective | None = None,
    num_processes: int = 1,
) -> BaseModel:
    """The base in this process. folder: for models that leave memory. group: see `SharedBase`.
    num_processes: of this machine, with models. Raises UserError."""
    engine = config.actor_rollout_ref.rollout.name
    if ROLLOUT_ENGINES[engine].in_server:
        raise UserError(
            f"actor_rollout_ref.rollout.name={engine} runs in a server of its own: --tinker "
            "samples with embedded or hf"
        )

    check_extensions(config)
    require_peft()
    make_process_ready(config)
    device = choose_device(config)
    source = policy_source(config)
    model = load_model(**source, device=device)
    # the base's weights, which the engine over it shares: clients do not change them
    weights = {id(weight): weight for weight in model.parameters()}
    plain = copy.deepcopy(model, {**weights})
    tokenizer = load_policy_tokenizer(config)

    def make(checkpoint: Path | None) -> RolloutEngine:
        is_shared = checkpoint is None and model.dtype == engine_dtype(config)
        own = copy.deepcopy(plain, {**weights} if is_shared else {})
        if checkpoint is None:
            make_row_adaptable(own)
        else:
            own = with_weights(own, checkpoint)
        cast_weights(own, engine_dtype(config))
        return make_engine(config, own, tokenizer, False, policy_engine_options(config))

    memory = ModelMemory(max_model_bytes(device, num_processes), folder)
    return BaseModel(
        name,
        str(resolve_path(source["path"])),
        model.config.model_type,
        policy_limits(config).context or LONGEST,
        stop_token_ids(model, tokenizer),
        partial(TrainedAdapter, SharedBase(model, compute_dtype(config), memory, group)),
        partial(Samplers, make),
        partial(tokenizer.decode, skip_special_tokens=False),
    )


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
