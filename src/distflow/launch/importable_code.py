"""Whether the workers of a run can import the user's functions and unpickle its spec."""

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from distflow.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    Registry,
)
from distflow.config import Config
from distflow.config.derived_settings import (
    PREFERENCE_LOSS,
    WORKFLOW,
    functions_of_pipeline,
    named_algorithms,
)
from distflow.errors import UserError
from distflow.import_target import innermost, is_pickled, load
from distflow.runtime.spec import Spec

_ADVICE = "Put it into a file beside your script or on the PYTHONPATH, say my_code.py, and set "


def check_importable(config: Config) -> None:
    """Raises UserError with a module or function that a worker cannot import."""
    for name in config.trainer.imports:
        if not _can_be_imported(name):
            raise UserError(
                f"trainer.imports: a worker in another process cannot import '{name}': it is not "
                f"in a file that Python can find. {_ADVICE}trainer.imports=[my_code]"
            )

    for key, fn in _users_functions(config):
        plain = innermost(fn)
        if not _can_be_imported(plain.__module__):
            name = getattr(plain, "__qualname__", repr(fn))
            named = "trainer.imports=[my_code]"
            if key == "dag.pipeline":
                named = f"my_code:{name} instead"

            raise UserError(
                f"{key}: the function {name} is in '{plain.__module__}', which a worker in another "
                f"process cannot import. {_ADVICE}{named}"
            )


def check_pickles(spec: Spec) -> None:
    """Raises UserError with the part of the spec that cannot be pickled."""
    for item in fields(spec):
        try:
            pickle.dumps(getattr(spec, item.name))
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            raise UserError(
                f"the run cannot be sent to a worker: its '{item.name}' does not pickle ({err})"
            ) from err


def _users_functions(config: Config) -> Iterator[tuple[str, Callable[..., object]]]:
    """(key that names it, function) for all functions that are looked up by name."""
    loaded = [("dag.pipeline", name) for name in functions_of_pipeline(config)]
    workflow = config.actor_rollout_ref.rollout.workflow
    if workflow and ":" in workflow:
        loaded.append((WORKFLOW, workflow))

    # pickled ones are sent unchanged
    for key, name in loaded:
        if not is_pickled(name):
            found: Any = load(name)
            yield key, found

    for key, name in named_algorithms(config):
        if not is_pickled(name):
            yield key, _registry(key).find(name).fn


def _registry(key: str) -> Registry[Any]:
    if key.endswith("policy_loss"):
        return POLICY_LOSSES
    if key == PREFERENCE_LOSS:
        return PREFERENCE_LOSSES
    return ADV_ESTIMATORS


def entry_to_send(key: str, name: str, config: Config, given: Callable[..., object] | None) -> Any:
    """The estimator or loss to pickle for a key: the function passed from Python as `name`, else
    the one that the calling script or cell registered as `name`; None if workers find it by name.
    Raises UserError for a function that cannot be called."""
    if given is None:
        entry = None if ":" in name else _registry(key).own(name)
        is_found = (
            entry is not None
            and config.trainer.imports
            and _can_be_imported(innermost(entry.fn).__module__)
        )
        return None if is_found else entry

    try:
        return _registry(key).read(name, given)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error


def _can_be_imported(module: str) -> bool:
    if module == "__main__":
        return False
    if module.endswith(".py"):
        return Path(module).is_file()

    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec was created at run time
        return False

    return found is not None and found.origin is not None
