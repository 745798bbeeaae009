"""Rules of rollout engines and their servers: options, devices, weight syncs."""

import re
from operator import attrgetter

from distflow.builtin_names import ROLLOUT_ENGINES, RolloutEngineEntry
from distflow.config.derived_settings import find_pipeline, is_rl
from distflow.config.keys.reward import scoring_models
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, ROLLOUT, Finding, Findings
from distflow.errors import count_of

_NAME = f"{ROLLOUT}.name"


def allocation_decides(config: Config) -> bool:
    """Whether the allocation names another rollout engine; it replaces a default, and the rules run
    again."""
    allocation = config.trainer.allocation or ""
    return bool(allocation) and not re.search(
        rf"\b{re.escape(config.actor_rollout_ref.rollout.name)}\b", allocation
    )


def server_of(config: Config) -> RolloutEngineEntry | None:
    """The engine, if it is certain to compute in a server."""
    entry = ROLLOUT_ENGINES.get(config.actor_rollout_ref.rollout.name)
    is_server = entry is not None and entry.in_server and not allocation_decides(config)
    return entry if is_server else None


def server_keys(config: Config) -> tuple[str, ...]:
    """The keys of servers that are set."""
    rollout = config.actor_rollout_ref.rollout
    names = [name for name in ("python", "url", "engine_kwargs") if getattr(rollout, name)]
    if rollout.data_parallel_size > 1:
        names.append("data_parallel_size")
    return tuple(f"{ROLLOUT}.{name}" for name in names)


def weight_sync(config: Config) -> Findings:
    """Weight syncs are frequent enough for the staleness."""
    every = config.actor_rollout_ref.actor.model_update_frequency
    staleness = config.async_.max_staleness
    if is_rl(config) and every - 1 > staleness:
        yield Finding(
            (f"{ACTOR}.model_update_frequency", "async.max_staleness"),
            f"a weight sync every {every} steps makes samples up to {count_of(every - 1, 'step')} "
            f"old, but {staleness} is allowed",
            f"set {ACTOR}.model_update_frequency={staleness + 1} or less",
        )


def oversampling(config: Config) -> Findings:
    """More groups than a step needs run only where generation and training alternate."""
    pipeline = find_pipeline(config)
    key = "algorithm.filter_groups.oversampling"
    share = config.algorithm.filter_groups.oversampling
    if pipeline is not None and pipeline.oversample_factor:
        key = pipeline.oversample_factor
        share = attrgetter(key)(config) - 1

    if is_rl(config) and share > 0 and config.async_.max_staleness:
        yield Finding(
            (key, "async.max_staleness"),
            "ahead of training groups start as soon as the staleness allows, and none is aborted",
            "remove it, or set async.max_staleness=0",
        )


def running_servers(config: Config) -> Findings:
    """A server that runs already has its own options."""
    url = config.actor_rollout_ref.rollout.url
    keys = server_keys(config)
    if server_of(config) and url and len(keys) > 1:
        what = "the server at that address was started with options of its own"
        yield Finding(keys, what, "remove the others")


def engine_options(config: Config) -> Findings:
    """Options of a server belong to an engine."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.engine_kwargs"

    if server_of(config):
        for name, options in rollout.engine_kwargs.items():
            if name not in ROLLOUT_ENGINES or not isinstance(options, dict):
                advice = f"write for example {key}.{rollout.name}.max_model_len=4096"
                yield Finding((key,), "options belong to an engine", advice)


def judges(config: Config) -> Findings:
    """A judge has an engine that can compute another model."""
    name = config.actor_rollout_ref.rollout.name
    for judge, model in scoring_models(config.reward_model).items():
        if model.judge and server_of(config):
            yield Finding(
                (f"reward_model.models.{judge}.judge", _NAME),
                f"a judge has the engine of the rollout, and '{name}' is the server of one model",
                f"set {_NAME}=embedded, or serve the judge and set reward.functions",
            )


def tensor_parallel(config: Config) -> Findings:
    """An engine on several devices supports this, and has them for itself."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    size = rollout.tensor_model_parallel_size
    entry = ROLLOUT_ENGINES.get(rollout.name)
    if size == 1 or entry is None or allocation_decides(config):
        return

    if "t" not in entry.sizes:
        able = " or ".join(name for name, entry in ROLLOUT_ENGINES.items() if "t" in entry.sizes)
        option = f"{ROLLOUT}.engine_kwargs.{rollout.name}.{entry.size_option}"

        own = "keep the default 1"
        if entry.size_option:
            own = f"set {option}={size}"

        why = f"the engine '{rollout.name}' has one device"
        yield Finding((key, _NAME), why, f"set {_NAME}={able}, or {own}")
        return

    if rollout.url or rollout.data_parallel_size > 1:
        other = f"{ROLLOUT}.{'url' if rollout.url else 'data_parallel_size'}"
        why = "several devices are for one server that the run starts"
        yield Finding((key, other), why, "remove one of them")

    devices = config.trainer.n_gpus_per_node
    if not config.trainer.allocation and devices % size:
        yield Finding(
            (key, "trainer.n_gpus_per_node"),
            f"an engine needs {size} devices of one machine, and {devices} is not a multiple of "
            f"{size}",
            f"set for example trainer.n_gpus_per_node={devices + -devices % size}",
        )


RULES = (
    weight_sync,
    oversampling,
    running_servers,
    engine_options,
    judges,
    tensor_parallel,
)
