"""Finds the nearest change of a config with which a run fits that does not."""

from collections.abc import Callable, Iterator, Mapping

from distflow.config import Config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError
from distflow.planning.model_memory import MICRO_TOKENS, longest_sequence, with_server_share
from distflow.planning.predicted_run import PredictedRun
from distflow.planning.search_allocations import CHECKPOINTING, RAY, STRATEGY, Change


def nearest_change(
    run: PredictedRun,
    again: Callable[[Config], PredictedRun],
    with_change: Callable[[Change], Config | None],
) -> Change | None:
    """The first change of the config with which the run fits: one key where that suffices, cheapest
    in time first, then several, then more devices; None if none does. with_change: the config with
    a change, checked; None if it is not allowed."""

    def predicted(config: Config | None) -> bool:
        try:
            return config is not None and again(config).fits
        except UserError:
            return False

    def fits(change: Change) -> bool:  # checking a whole config takes longer than a prediction
        return predicted(with_values(run.config, dict(change))) and predicted(with_change(change))

    for change in _changes(run):
        if fits(change):
            return _without_needless(change, fits)
    return None


def _without_needless(change: Change, fits: Callable[[Change], bool]) -> Change:
    for part in change:
        rest = tuple(other for other in change if other != part)
        if rest and fits(rest):
            change = rest
    return change


def _changes(run: PredictedRun) -> Iterator[Change]:
    """Single ones, then together with those before each, then with more devices."""
    singles = list(_single_changes(run))
    for key, value in singles:
        yield ((key, value),)
    joined: dict[str, object] = {}
    for key, value in singles:
        joined[key] = value
        yield tuple(joined.items())
    yield from _more_devices(run, joined)


def _single_changes(run: PredictedRun) -> Iterator[tuple[str, object]]:
    """Keys that need less memory and keep what is computed, cheapest in time first."""
    settings = run.config.actor_rollout_ref
    limit = settings.actor.ppo_max_token_len_per_gpu or MICRO_TOKENS[run.device.kind]
    limit //= 2
    while limit >= longest_sequence(run.config):
        yield "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", limit
        limit //= 2
    if not settings.model.enable_gradient_checkpointing:
        yield CHECKPOINTING, True
    responses = settings.rollout.max_num_seqs
    while responses > 16:
        responses //= 2
        yield "actor_rollout_ref.rollout.max_num_seqs", responses
    if run.device.is_cpu:
        return
    for share in (0.7, 0.5, 0.3):
        if 0 < 1.2 * _server_weights(run) < share * run.device.memory:  # else it would not start
            yield with_server_share(run.config, share)
    yield "actor_rollout_ref.rollout.free_cache_engine", True
    roles = ["actor_rollout_ref.actor"]
    if "critic" in run.plan.ranks[-1].engines:
        roles.append("critic")
    for role in roles:
        yield f"{role}.fsdp_config.optimizer_offload", True
        yield f"{role}.fsdp_config.param_offload", True


def _server_weights(run: PredictedRun) -> float:
    """Bytes of the weights in the rollout's server; 0 if there is none."""
    for worker in run.workers:
        for item in worker.items:
            if item.in_server and item.what == "weights":
                return item.num_bytes
    return 0.0


def _more_devices(run: PredictedRun, others: Mapping[str, object]) -> Iterator[Change]:
    """Sharded weights on as many devices and on more, with and without the other changes."""
    trainer = run.config.trainer
    if trainer.allocation:
        return
    nodes = trainer.nnodes
    size = trainer.n_gpus_per_node
    for step in range(10):
        if step or nodes * size == 1:
            if size < 8:
                size *= 2
            else:
                nodes *= 2
        keys: dict[str, object] = {STRATEGY: "fsdp", "trainer.n_gpus_per_node": size}
        if nodes > 1:
            keys["trainer.nnodes"] = nodes
        if nodes > 1 or trainer.launcher == "local":
            keys |= dict(RAY)
        yield tuple(keys.items())
        yield tuple({**others, **keys}.items())
