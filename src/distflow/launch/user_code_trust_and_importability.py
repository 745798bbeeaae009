"""Python code that a config names: what it is, whether it may run, and whether a worker in another
process can import it.

Commands that run the user's config report its code; those that read a run's folder, which may be
another person's, run it only when asked to."""

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from distflow.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, Registry
from distflow.config import Config
from distflow.config.derived_settings import (
    WORKFLOW,
    code_of_workflow,
    data_files,
    functions_of_pipeline,
    named_algorithms,
    named_rewards,
)
from distflow.data.sources import is_function
from distflow.errors import UserError
from distflow.import_target import innermost, is_pickled, load
from distflow.models.model_paths_and_folder_checks import code_of
from distflow.runtime.spec import Spec

TRUST_CODE = "--trust-code"


def named_code(config: Config) -> list[str]:
    """Everything that a run imports or calls, as `key: name`."""
    custom = config.custom_reward_function
    code = [*pipeline_code(config)]
    code += [f"custom_reward_function: {custom.path}:{custom.name}"] if custom.path else []
    for key, _, parts in named_rewards(config):  # "module:function" or "file.py:function"
        names = [part.name for part in parts if ":" in part.name]
        code += [f"{key}: {name}" for name in names if not name.startswith("distflow.")]
    return [*code, *data_code(config), *model_code(config)]


def code_of_run(config: Config, generates_only: bool) -> list[str]:
    """Everything that an evaluation with a run's config would run, and where it would send
    responses and a key. generates_only: no pipeline and no reward function."""
    rollout = config.actor_rollout_ref.rollout
    imports = config.trainer.imports
    code = [f"trainer.imports: {name}" for name in imports] + model_code(config)
    parts = (
        []
        if generates_only
        else [(key, part) for key, _, own in named_rewards(config) for part in own]
    )
    sent = [
        (key, f"{part.name} at {url}")
        for key, part in parts
        for url in part.options.values()
        if "://" in str(url)
    ]
    sent += [("actor_rollout_ref.rollout.url", url) for url in rollout.url]
    sent += [("actor_rollout_ref.rollout.python", rollout.python)] if rollout.python else []
    sent += [
        ("actor_rollout_ref.rollout.engine_kwargs", f"{each}")
        for each in rollout.engine_kwargs.items()
    ]
    return (code if generates_only else named_code(config)) + [
        f"{key}: {what}" for key, what in sent
    ]


def data_code(config: Config) -> list[str]:
    """The functions that make rows, and the one that weights the domains, which planning a run's
    data loads."""
    files = data_files(config, "train_files") | data_files(config, "val_files")
    own = config.data.curriculum.function
    code = []
    for key, named in files.items():
        for file in named:
            if is_function(file):
                code.append(f"{key}: {file}")
    return [*code, f"data.curriculum.function: {own}"] if own and ":" in own else code


def pipeline_code(config: Config) -> list[str]:
    """Everything that building the pipeline imports or calls: the imported modules, its functions,
    and those that its nodes load."""
    named = [
        ("dag.pipeline", name)
        for name in functions_of_pipeline(config)
        if not name.startswith("distflow.")
    ]
    accepts = config.algorithm.filter_groups.should_accept
    named += [("algorithm.filter_groups.should_accept", accepts)] if accepts else []
    command = config.actor_rollout_ref.rollout.workflow_kwargs.get("command")
    named += [(f"{WORKFLOW}_kwargs.command", str(command))] if command else []
    servers = config.actor_rollout_ref.rollout.workflow_kwargs.get("mcp")
    named += [
        (f"{WORKFLOW}_kwargs.mcp", str(server))
        for server in (servers if isinstance(servers, list) else [])
    ]
    return algorithm_code(config) + [
        f"{key}: {name}" for key, name in named + code_of_workflow(config)
    ]


def algorithm_code(config: Config) -> list[str]:
    """The modules that register losses etc., and the functions that are an estimator or a loss."""
    functions = [(key, name) for key, name in named_algorithms(config) if ":" in name]
    own = [f"{key}: {name}" for key, name in functions if not name.startswith("distflow.")]
    return [f"trainer.imports: {name}" for name in config.trainer.imports] + own


def model_code(config: Config) -> list[str]:
    """The code of models and tokenizers, if `trust_remote_code` lets it run."""
    model = config.actor_rollout_ref.model
    if not model.trust_remote_code:
        return []
    paths = dict.fromkeys(
        path for path in (model.path, model.tokenizer_path, config.critic.model.path) if path
    )
    return [
        f"actor_rollout_ref.model.trust_remote_code: {code}"
        for path in paths
        for code in code_of(path)
    ]


def only_if_trusted(code: list[str], trusted: bool, say: Callable[[str], None]) -> None:
    """Report the code that is about to run. Raises UserError with it unless trusted."""
    lines = "".join(f"\n  {line}" for line in code)
    if code and not trusted:
        raise UserError(
            f"this would run the following Python code:{lines}\n"
            f"Nothing was run. Read that code; if you trust it, add {TRUST_CODE}"
        )
    if code:
        say(f"running Python code:{lines}")


def without_model_code(config: Config) -> Config:
    """The config with `trust_remote_code` off."""
    settings = config.actor_rollout_ref
    model = replace(settings.model, trust_remote_code=False)
    return replace(config, actor_rollout_ref=replace(settings, model=model))


_ADVICE = "Put it into a file beside your script or on the PYTHONPATH, say my_code.py, and set "


def check_importable(config: Config) -> None:
    """Raises UserError with a module or function that a worker cannot import."""
    for name in config.trainer.imports:
        if not _can_be_imported(name):
            raise UserError(
                f"trainer.imports: a worker in another process cannot import '{name}': it is not "
                "in a file that "
                f"Python can find. {_ADVICE}trainer.imports=[my_code]"
            )
    for key, fn in _users_functions(config):
        plain = innermost(fn)
        if not _can_be_imported(plain.__module__):
            name = getattr(plain, "__qualname__", repr(fn))
            named = (
                f"my_code:{name} instead" if key == "dag.pipeline" else "trainer.imports=[my_code]"
            )
            raise UserError(
                f"{key}: the function {name} is in '{plain.__module__}', which a worker in another "
                "process cannot "
                f"import. {_ADVICE}{named}"
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
    named = [("dag.pipeline", name) for name in functions_of_pipeline(config)] + named_algorithms(
        config
    )
    workflow = config.actor_rollout_ref.rollout.workflow
    named += [(WORKFLOW, workflow)] if workflow and ":" in workflow else []
    for key, name in named:
        if not is_pickled(name):  # pickled ones are sent unchanged
            found: Any = (
                load(name) if key in ("dag.pipeline", WORKFLOW) else _registry(key).find(name).fn
            )
            yield key, found


def _registry(key: str) -> Registry[Any]:
    return POLICY_LOSSES if key.endswith("policy_loss") else ADV_ESTIMATORS


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
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec was created at run time
        return False
    return found is not None and found.origin is not None
