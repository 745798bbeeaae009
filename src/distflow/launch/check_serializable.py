"""Whether a spec can be sent to a worker in another process: it pickles, and the user's functions can be imported."""

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields

from distflow.algorithms.registry import find_adv_est, find_policy_loss
from distflow.config import Config
from distflow.config.derived_settings import algorithms, functions_of_pipeline, is_rl
from distflow.errors import UserError
from distflow.graph.fields import innermost
from distflow.import_target import load_function
from distflow.runtime.spec import Spec

_REGISTERED = _ESTIMATOR, _LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss"
_ADVICE = "Put it into a file beside your script or on the PYTHONPATH, say my_code.py, and set "


def check_importable(config: Config) -> None:
    """Raises UserError naming a module or function that a worker cannot import."""
    for name in config.trainer.imports:
        if not _can_be_imported(name):
            raise UserError(
                f"trainer.imports: a worker in another process cannot import '{name}': it comes from no file that "
                f"Python finds. {_ADVICE}trainer.imports=[my_code]"
            )
    for key, fn in _users_functions(config):
        plain = innermost(fn)
        if not _can_be_imported(plain.__module__):
            name = getattr(plain, "__qualname__", repr(fn))
            named = "trainer.imports=[my_code]" if key in _REGISTERED else f"my_code:{name} in its place"
            raise UserError(
                f"{key}: the function {name} lives in '{plain.__module__}', which a worker in another process cannot "
                f"import. {_ADVICE}{named}"
            )


def check_pickles(spec: Spec) -> None:
    """Raises UserError naming the part of the spec that cannot be sent."""
    for item in fields(spec):
        try:
            pickle.dumps(getattr(spec, item.name))
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            raise UserError(f"the run cannot be sent to a worker: its '{item.name}' does not pickle ({err})") from err


def _users_functions(config: Config) -> Iterator[tuple[str, Callable[..., object]]]:
    """(key that names it, function) for all functions that are found by name."""
    for name in functions_of_pipeline(config):
        yield "dag.pipeline", load_function(name)
    if is_rl(config):
        for domain, algorithm in algorithms(config):
            key = _ESTIMATOR if domain is None else f"algorithm.domains.{domain}.adv_estimator"
            yield key, find_adv_est(algorithm.adv_estimator).fn
        yield _LOSS, find_policy_loss(config.actor_rollout_ref.actor.policy_loss).fn


def _can_be_imported(module: str) -> bool:
    if module == "__main__":
        return False
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec was created at run time
        return False
    return found is not None and found.origin is not None
