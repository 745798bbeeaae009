"""The allocation is the one authority: keys that nobody set follow it, and one that says otherwise is an error."""

from collections.abc import Iterator

from distflow.config import Config, Loaded, with_changes
from distflow.config.errors import UserError
from distflow.config.fitting import is_free
from distflow.planning.allocation import KEY, Allocation, parse_allocation, require_engines

_NODES, _DEVICES = "trainer.nnodes", "trainer.n_gpus_per_node"
_ROLLOUT = "actor_rollout_ref.rollout"


def follow_allocation(loaded: Loaded) -> Loaded:
    """The config in which what nobody set says what the allocation says; `check_agreement` judges the rest.

    Raises UserError for what is no allocation or names an engine that is not there yet, ConfigError where other keys
    do not go with its engines.
    """
    if not loaded.config.trainer.allocation:
        return loaded
    allocation = parse_allocation(loaded.config.trainer.allocation)
    require_engines(allocation)
    said = [*_devices(allocation, loaded), *_engines(allocation, loaded.config)]
    changes = [
        (key, value, f"{KEY} says so") for key, there, value in said if there != value and is_free(key, loaded.origins)
    ]
    return with_changes(loaded, changes)


def check_agreement(allocation: Allocation, config: Config) -> None:
    """Raises UserError, naming both, for a key that says something else than the allocation."""
    nodes, devices = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes * devices != allocation.num_devices:
        raise UserError(
            f"{KEY}='{allocation.text}' takes {allocation.num_devices} devices, and {_NODES}={nodes} × "
            f"{_DEVICES}={devices} are {nodes * devices}: change one of them"
        )
    for key, there, said in _engines(allocation, config):
        if there != said:
            raise UserError(f"{key}={there} contradicts {KEY}='{allocation.text}', which says {said}: take one back")


def _engines(allocation: Allocation, config: Config) -> Iterator[tuple[str, object, object]]:
    """Keys of engines that the allocation decides: (key, value, what the allocation says)."""
    rollout, actor = allocation.find("rollout"), allocation.find("actor")
    settings = config.actor_rollout_ref
    if rollout is not None:
        tensor = settings.rollout.tensor_model_parallel_size
        yield f"{_ROLLOUT}.name", settings.rollout.name, rollout.engine
        yield f"{_ROLLOUT}.tensor_model_parallel_size", tensor, rollout.sizes.tensor
    if actor is not None:
        yield "actor_rollout_ref.actor.strategy", settings.actor.strategy, actor.engine


def _devices(allocation: Allocation, loaded: Loaded) -> Iterator[tuple[str, object, object]]:
    """Machines and devices of each: what was set of them stays, if it divides the devices; unset, it is one machine."""
    nodes, devices = loaded.config.trainer.nnodes, loaded.config.trainer.n_gpus_per_node
    total = allocation.num_devices
    if is_free(_DEVICES, loaded.origins) and total % nodes == 0:
        yield _DEVICES, devices, total // nodes
    elif is_free(_NODES, loaded.origins) and total % devices == 0:
        yield _NODES, nodes, total // devices
