"""Whether a spec can be sent to a worker in another process: it pickles, and the user's functions can be imported."""

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields

from distflow.algorithms.registry import find_adv_est, find_policy_loss
from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.functions import load_function
from distflow.config.program import is_rl
from distflow.graph.functions import innermost
from distflow.runtime.spec import Spec


def check_importable(config: Config) -> None:
    """Raises UserError naming a module or function that a worker could not import."""
    for name in config.trainer.imports:
        if not name.endswith(".py") and not _can_be_imported(name):
            raise UserError(f"trainer.imports: a worker in another process cannot import '{name}': give it a file")
    for key, fn in _users_functions(config):
        plain = innermost(fn)
        if not _can_be_imported(plain.__module__):
            name = getattr(plain, "__qualname__", repr(fn))
            raise UserError(
                f"{key}: the function {name} lives in '{plain.__module__}', which a worker in another process cannot "
                "import: put it into a module of its own file, and name that in trainer.imports"
            )


def check_pickles(spec: Spec) -> None:
    """Raises UserError naming the part of the spec that cannot be sent."""
    for item in fields(spec):
        try:
            pickle.dumps(getattr(spec, item.name))
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            raise UserError(f"the run cannot be sent to a worker: its '{item.name}' does not pickle ({err})") from err


def _users_functions(config: Config) -> Iterator[tuple[str, Callable[..., object]]]:
    """(key that chose it, function) of what is found by name."""
    if config.dag.custom_pipeline_fn:
        yield "dag.custom_pipeline_fn", load_function(config.dag.custom_pipeline_fn)
    if is_rl(config):
        yield "algorithm.adv_estimator", find_adv_est(config.algorithm.adv_estimator).fn
        yield "actor_rollout_ref.actor.policy_loss", find_policy_loss(config.actor_rollout_ref.actor.policy_loss).fn


def _can_be_imported(module: str) -> bool:
    if module == "__main__":
        return False
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec was made by hand
        return False
    return found is not None and found.origin is not None
