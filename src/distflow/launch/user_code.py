"""The user's code that a run would execute: of a config by somebody else only with consent."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow.config import Config, config_of_run
from distflow.config.derived_settings import (
    WORKFLOW,
    code_of_workflow,
    data_files,
    functions_of_pipeline,
    named_algorithms,
    named_rewards,
)
from distflow.config.keys.schema import to_dict
from distflow.data.sources import is_function
from distflow.errors import UserError
from distflow.import_target import is_pickled, module_files, split_name
from distflow.models.model_folder import code_of
from distflow.observe.crash_safe_files import to_json
from distflow.untrusted_files import own_cache

TRUST_CODE = "--trust-code"


def named_code(config: Config) -> list[str]:
    """Everything that a run imports or calls, as `key: name`."""
    code = pipeline_code(config)
    custom = config.custom_reward_function
    if custom.path:
        code.append(f"custom_reward_function: {custom.path}:{custom.name}")
    for key, _, parts in named_rewards(config):
        code += _functions((key, part.name) for part in parts)
    return [*code, *data_code(config), *model_code(config)]


def code_of_run(config: Config, generates_only: bool) -> list[str]:
    """Everything that an evaluation with a run's config would run, and where it would send
    responses and a key. generates_only: no pipeline and no reward function."""
    rollout = config.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout"

    if generates_only:
        code = [f"trainer.imports: {name}" for name in config.trainer.imports] + model_code(config)
    else:
        code = named_code(config)
        for reward_key, _, parts in named_rewards(config):
            for part in parts:
                for url in part.options.values():
                    if "://" in str(url):
                        code.append(f"{reward_key}: {part.name} at {url}")

    code += [f"{key}.url: {url}" for url in rollout.url]
    if rollout.python:
        code.append(f"{key}.python: {rollout.python}")
    return code + [f"{key}.engine_kwargs: {option}" for option in rollout.engine_kwargs.items()]


def data_code(config: Config) -> list[str]:
    """The functions that make rows, which planning a run's data loads."""
    code = []
    for split in ("train_files", "val_files"):
        for key, files in data_files(config, split).items():
            code += [f"{key}: {file}" for file in files if is_function(file)]
    return code


def pipeline_code(config: Config) -> list[str]:
    """Everything that building the pipeline imports or calls: the imported modules, its functions,
    and those that its nodes load."""
    code = algorithm_code(config)
    for name in functions_of_pipeline(config):
        if not name.startswith("distflow."):
            code.append(f"dag.pipeline: {name}")

    accepts = config.algorithm.filter_groups.should_accept
    if accepts:
        code.append(f"algorithm.filter_groups.should_accept: {accepts}")
    options = config.actor_rollout_ref.rollout.workflow_kwargs
    if options.get("command"):
        code.append(f"{WORKFLOW}_kwargs.command: {options['command']}")
    servers = options.get("mcp")
    if isinstance(servers, list):
        code += [f"{WORKFLOW}_kwargs.mcp: {server}" for server in servers]
    if config.data.sampler is not None:
        code.append(f"data.sampler: {config.data.sampler}")
    return code + [f"{key}: {name}" for key, name in code_of_workflow(config)]


def algorithm_code(config: Config) -> list[str]:
    """The modules that register losses etc., and the functions that are an estimator or a loss."""
    imports = [f"trainer.imports: {name}" for name in config.trainer.imports]
    return imports + _functions(named_algorithms(config))


def _functions(named: Iterable[tuple[str, str]]) -> list[str]:
    """Those of (key, name) that are the user's "module:function" or "file.py:function"."""
    code = []
    for key, name in named:
        if ":" in name and not name.startswith("distflow."):
            code.append(f"{key}: {name}")
    return code


def model_code(config: Config) -> list[str]:
    """The code of models and tokenizers, if `trust_remote_code` lets it run."""
    model = config.actor_rollout_ref.model
    if not model.trust_remote_code:
        return []

    code = []
    for path in dict.fromkeys((model.path, model.tokenizer_path, config.critic.model.path)):
        if path:
            code += code_of(path)

    return [f"actor_rollout_ref.model.trust_remote_code: {each}" for each in code]


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


def remember_own_run(config: Config) -> None:
    """Let commands run the code of this config again without asking, for this user, on this machine
    and from this folder, to which its code may be relative."""
    if code_of_run(config, generates_only=False):
        with suppress(OSError):  # without a folder that only this user can write to, they ask
            _own_run(to_dict(config)).touch()


def is_own_run(values: Mapping[str, Any]) -> bool:
    """Whether this user started a run with this config, and with code whose files have not changed.
    values: the config of a checkpoint."""
    with suppress(OSError):
        return _own_run(values).is_file()
    return False


def _own_run(values: Mapping[str, Any]) -> Path:
    """A file in this user's cache that is there if a run with this config and code was started."""
    code = code_of_run(config_of_run(values), generates_only=False)
    digests = []
    for line in code:
        for file in _files(line):
            digests.append(hashlib.sha256(file.read_bytes()).hexdigest())

    content = json.dumps([str(Path.cwd()), code, digests, to_json(values)], sort_keys=True)
    return own_cache() / f"own-run-{hashlib.sha256(content.encode()).hexdigest()}"


def _files(line: str) -> Iterator[Path]:
    """The files that a line of `code_of_run` names: of a function, of a module, or among the words
    of a command."""
    for word in line.partition(": ")[2].split():
        place = split_name(word)[0] if ":" in word else word
        if place.endswith(".py") or is_pickled(word) or "/" in place:
            named = [Path(place).expanduser()]
        else:
            stem = place.replace(".", "/")
            named = [Path(f"{stem}.py"), Path(stem, "__init__.py"), *module_files(place)]

        for file in named:
            if file.is_file():
                yield file
                break
