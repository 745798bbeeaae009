"""The user's code that a run would execute: of a config by somebody else only with consent."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
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
    """The functions that make rows, which planning a run's data loads."""
    files = data_files(config, "train_files") | data_files(config, "val_files")
    code = []
    for key, named in files.items():
        for file in named:
            if is_function(file):
                code.append(f"{key}: {file}")
    return code


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
        is_file = place.endswith(".py") or is_pickled(word)
        stem = place.replace(".", "/")
        modules = [Path(f"{stem}.py"), Path(stem, "__init__.py"), *module_files(place)]
        named = [Path(place).expanduser()] if is_file or "/" in place else modules
        yield from [file for file in named if file.is_file()][:1]
