"""Arguments of the Python API as config: keys become `key=value` lines; rows and a reward function
become files in the run's folder, where a resumed run, its evaluation and its reward processes find
them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import yaml

from distflow.config import Config, Loaded, flatten, pipeline_name
from distflow.config.compose.override_grammar import quote
from distflow.config.compose.setting_origins import COMMAND_LINE, IN_PYTHON
from distflow.config.compose.typed_values import Mismatch, parse_value
from distflow.config.derived_settings import ADV_ESTIMATOR, POLICY_LOSS, is_rl
from distflow.config.keys.declare import dotted
from distflow.config.keys.schema import schema_keys, with_values
from distflow.data.python_rows import GivenRows, keep_rows
from distflow.errors import Problem, UserError
from distflow.import_target import is_pickled, split_name

Overrides: TypeAlias = Mapping[str, object] | Sequence[str]
Rows: TypeAlias = str | Path | GivenRows
Reward: TypeAlias = Callable[..., object]

# The config's placeholders while it is checked, before anything is written.
_ROWS_TO_COME = "builtin:arithmetic-rl"
_REWARD_TO_COME = "distflow.rewards.math.reward"
_FUNCTIONS = {
    "advantage": (
        ADV_ESTIMATOR,
        "distflow.algorithms.methods.grpo:compute_grpo_advantage",
    ),
    "loss": (POLICY_LOSS, "distflow.algorithms.methods.ppo:compute_vanilla_loss"),
    "pipeline": ("dag.pipeline", "distflow.pipelines.grpo:grpo_pipeline"),
    "workflow": (
        "actor_rollout_ref.rollout.workflow",
        "distflow.environments.builtin_workflows:single_turn",
    ),
}
"""The key of each function argument, and its placeholder until the file is written."""


def to_lines(overrides: Overrides) -> list[str]:
    """One line for each key of a mapping, nested or with dotted keys; lines are returned unchanged.

    Raises UserError for any other type, and for a value that a config cannot hold.
    """
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={_text(value, key)}" for key, value in _leaves("", overrides)]
    if not isinstance(overrides, Sequence) or not all(isinstance(line, str) for line in overrides):
        raise UserError(
            f"overrides are {overrides!r:.80}: pass a dict, or a list of strings 'key=value'"
        )

    return list(overrides)


def key_of(line: str) -> str:
    return line.partition("=")[0].lstrip("+~")


def _leaves(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    keys = schema_keys()
    for name, value in values.items():
        key = dotted(prefix, str(name))
        if isinstance(value, Mapping) and value and key not in keys:
            yield from _leaves(key, cast(Mapping[str, object], value))
        else:
            yield key, value


def _text(value: Any, key: str) -> str:
    """The value in the grammar of overrides. Raises UserError."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str | Path):
        return quote(str(value))
    if isinstance(value, Mapping):
        entries = [f"{quote(str(name))}:{_text(item, key)}" for name, item in value.items()]
        return "{" + ",".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item, key) for item in value) + "]"
    if callable(plain := getattr(value, "tolist", None)):  # numbers of numpy or torch
        return _text(plain(), key)
    if hasattr(value, "save_pretrained"):
        what = (
            f"{type(value).__name__}: save it to a folder with its save_pretrained, and name the "
            "folder"
        )
        raise UserError(f"{key} is an object of {what}")
    if callable(value):
        raise UserError(
            f"{key} is a function: pass it as an argument, e.g. distflow.train(..., "
            "reward=function)"
        )

    raise UserError(
        f"{key} is {value!r:.80}, a {type(value).__name__}: a config has numbers, strings, lists "
        "and dicts"
    )


@dataclass(frozen=True)
class PythonInputs:
    """Rows and functions passed from Python; None if not passed. A str in place of rows is the
    key's value.

    advantage, loss: an advantage estimator and a policy loss; pipeline: a function that builds one;
    workflow: a function or a class that runs episodes. Raises UserError if one is not a function,
    or needs unknown parameters.
    """

    data: Rows | None = None
    val_data: Rows | None = None
    reward: Reward | None = None
    advantage: Callable[..., object] | None = None
    loss: Callable[..., object] | None = None
    pipeline: Callable[..., object] | None = None
    workflow: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name, (key, _) in _FUNCTIONS.items():
            function = getattr(self, name)
            is_areals = name == "workflow" and (
                hasattr(function, "arun_episode") or hasattr(function, "run_episode")
            )

            is_class = isinstance(function, type) and name != "workflow"
            if function is not None and not is_areals and (not callable(function) or is_class):
                raise UserError(
                    f"{name} is {function!r:.80}: pass a function. Named ones are set with {key}"
                )

        if self.reward is None:
            return

        from distflow.rewards.function_loading import find_fault, name_of

        if not callable(self.reward) or isinstance(self.reward, type):
            raise UserError(
                f"reward is {self.reward!r:.80}: pass one function. Named rewards are set by "
                "reward.functions, and one in a file by custom_reward_function.path"
            )
        if fault := find_fault(self.reward):
            raise UserError(f"reward: {name_of(self.reward)} {fault}")

    def lines(self, others: Sequence[str]) -> list[str]:
        """The keys to set for the config check. Raises UserError if `others` set the same ones."""
        lines = []
        for name, key in (("data", "data.train_files"), ("val_data", "data.val_files")):
            rows = getattr(self, name)
            if rows is not None:
                _check_free(key, name, others)
                lines += to_lines({key: rows if isinstance(rows, str | Path) else _ROWS_TO_COME})

        if self.reward is not None:
            _check_free("custom_reward_function", "reward", others)
            lines += [f"custom_reward_function.path={_REWARD_TO_COME}"]

        for name, (key, to_come) in _FUNCTIONS.items():
            if getattr(self, name) is not None:
                _check_free(key, name, others)
                lines += [f"{key}={to_come}"]

        return lines

    def in_python(self, problem: Problem) -> Problem:
        """The problem in terms of Python arguments, not of a command line and files that are not
        written yet."""
        places = []
        arguments = {key: name for name, (key, _) in _FUNCTIONS.items()}
        arguments["custom_reward_function.path"] = "reward"

        for what, where in problem.places:
            argument = arguments.get(what.partition(" = ")[0], "")
            is_passed = getattr(self, argument, None) is not None
            places.append(
                (argument if is_passed else what, "given" if where == COMMAND_LINE else where)
            )

        return replace(problem, places=tuple(places))

    def with_files(self, loaded: Loaded) -> Loaded:
        """The checked config with the paths of the files to write. Raises UserError for a function
        that nothing would call."""
        from distflow.rewards.function_loading import name_of

        config = loaded.config
        keys = list[str]()

        for name in ("reward", "advantage", "loss", "workflow"):
            if getattr(self, name) is not None and not is_rl(config):
                raise UserError(
                    f"{name} is given, and the pipeline {pipeline_name(config)} does not score "
                    "responses: remove it"
                )

        for key, file, _ in self._files(config):
            files: dict[str, Any] = {f"{key}_files": (str(file),)}
            config = replace(config, data=replace(config.data, **files))
            keys.append(f"data.{key}_files")

        if self.reward is not None:
            custom = replace(
                config.custom_reward_function,
                path=str(_reward_file(config)),
                name=name_of(self.reward),
            )
            config = replace(config, custom_reward_function=custom)
            keys += ["custom_reward_function.path", "custom_reward_function.name"]

        functions = {key: f"{file}:{name}" for key, file, name, _ in self._functions(config)}
        config = with_values(config, functions)
        keys = [*keys, *functions]

        # Overrides were read as lines of a command line, but there is none.
        origins = {
            key: IN_PYTHON if where == COMMAND_LINE else where
            for key, where in loaded.origins.items()
        }
        origins |= dict.fromkeys(keys, IN_PYTHON)

        return replace(loaded, config=config, origins=origins)

    def file_lines(self, config: Config) -> list[str]:
        """The lines that name the files in a checked config, for another process."""
        keys = [f"data.{key}_files" for key, _, _ in self._files(config)] + [
            key for key, *_ in self._functions(config)
        ]
        if self.reward is not None:
            keys += ["custom_reward_function.path", "custom_reward_function.name"]
        values = flatten(config)
        return to_lines({key: values[key] for key in keys})

    def write(self, config: Config, resuming: bool, say: Callable[[str], None]) -> None:
        """Write the files. Raises UserError for data that cannot be written, and if a resumed run
        had other rows."""
        from distflow.rewards.function_loading import fingerprint_function, write_function

        _folder(config).mkdir(mode=0o700, exist_ok=True)
        for key, file, rows in self._files(config):
            name = "data" if key == "train" else "val_data"
            wanted = getattr(config.data, f"{key}_max_samples")
            if keep_rows(rows, file, name=name, wanted=wanted, resuming=resuming):
                say(
                    f"{name}: the run resumes with its original rows, in {file}; the argument is "
                    "not used"
                )

        if self.reward is not None:
            write_function(self.reward, fingerprint_function(self.reward), _reward_file(config))

        for key, file, _, entry in self._functions(config):
            function = getattr(entry, "fn", entry)
            write_function(function, fingerprint_function(function), file, key, entry)

    def _functions(self, config: Config) -> Iterator[tuple[str, Path, str, Any]]:
        """(key, file, name, what is pickled) of each function except the reward: those passed, and
        the estimator and loss that the script registered."""
        from distflow.launch.importable_code import entry_to_send
        from distflow.rewards.function_loading import name_of

        values = flatten(config)
        for argument, (key, _) in _FUNCTIONS.items():
            entry = getattr(self, argument)
            chosen = str(values[key])

            if entry is not None:
                name = name_of(entry)
            elif is_pickled(chosen):
                name = split_name(chosen)[1]
            else:
                name = chosen

            if argument in ("advantage", "loss") and is_rl(config):
                entry = entry_to_send(key, name, config, entry)
            if entry is not None:
                yield key, _folder(config) / f"{argument}.pkl", name, entry

    def _files(self, config: Config) -> Iterator[tuple[str, Path, GivenRows]]:
        """("train" or "val", file, rows) of each file to write."""
        for key, rows in (("train", self.data), ("val", self.val_data)):
            if rows is not None and not isinstance(rows, str | Path):
                yield key, _folder(config) / f"{key}.jsonl", rows


def _folder(config: Config) -> Path:
    return config.trainer.run_dir / "data"


def _reward_file(config: Config) -> Path:
    return _folder(config) / "reward.pkl"


def _is_default(line: str) -> bool:
    """Whether a line gives a key the value that it has without it."""
    info = schema_keys().get(key_of(line))
    try:
        return (
            info is not None
            and parse_value(yaml.safe_load(line.partition("=")[2]), info) == info.default
        )
    except (Mismatch, yaml.YAMLError):
        return False


def _check_free(key: str, name: str, lines: Sequence[str]) -> None:
    for line in lines:
        if f"{key_of(line)}.".startswith(f"{key}.") and not _is_default(line):
            raise UserError(
                f"{key_of(line)} is set, and so is the argument {name}=: remove one of them"
            )
