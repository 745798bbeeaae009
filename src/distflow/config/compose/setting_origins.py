"""Origins of settings: keys of YAML files with their line numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from distflow.builtin_names import ESTIMATORS, PIPELINES
from distflow.config.keys.declare import dotted
from distflow.config.migration.tables import NOT_GIVEN
from distflow.errors import ConfigError, Problem
from distflow.method_files import METHODS, MethodFile
from distflow.untrusted_files import MAX_YAML_BYTES, check_aliases, read_file

COMMAND_LINE = "command line"
IN_PYTHON = "given in Python"
PRESETS = Path(__file__).parents[1] / "presets"


@dataclass(frozen=True)
class Setting:
    """A key that was set. is_group: its value is a mapping whose entries are settings too; it has
    no `value`. has_dots: its last name contains dots, which YAML does not treat as levels."""

    key: str
    where: str
    is_group: bool
    has_dots: bool = False
    value: object = NOT_GIVEN


@cache
def preset_files() -> dict[str, Path]:
    """The file of each preset by its name: settings alone, or a method."""
    methods = [path for path in METHODS.glob("*.py") if path.stem != "__init__"]
    return {path.stem: path for path in sorted([*PRESETS.glob("*.yaml"), *methods], key=_stem)}


def _stem(path: Path) -> str:
    return path.stem


def preset_names() -> list[str]:
    return list(preset_files())


def method_names() -> list[str]:
    return [name for name, path in preset_files().items() if path.parent == METHODS]


def describe_preset(name: str) -> str:
    """What is above the settings of a preset, in one line."""
    path = preset_files()[name]
    if path.parent == METHODS:
        method = MethodFile.of(path)
        return f"{method.title} {method.paper}".strip()
    lines = path.read_text("utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


PIPELINE_KEYS = ("dag.pipeline", "algorithm.workflow_type", "algorithm.adv_estimator")


def base_preset(values: Mapping[str, object], otherwise: str = "grpo") -> str:
    """The preset that a user's config builds on if it names none: that of the pipeline that its
    keys select.

    values: those of PIPELINE_KEYS that are set. otherwise: the result if they select no preset's
    pipeline.
    """
    pipeline, workflow_type, estimator = (values.get(key) for key in PIPELINE_KEYS)
    if pipeline is not None:
        if pipeline in preset_names():
            return str(pipeline)
        return otherwise
    return pipeline_of_algorithm(workflow_type, estimator) or otherwise


def pipeline_of_algorithm(workflow_type: object, estimator: object) -> str | None:
    """The pipeline that `algorithm` selects if `dag.pipeline` is null; None for the usual one."""
    needs_critic = estimator in ESTIMATORS and ESTIMATORS[str(estimator)].needs_critic
    chosen = pipeline_of_type(str(workflow_type).upper())
    return chosen or ("ppo" if needs_critic else None)


def pipeline_of_type(workflow_type: str) -> str | None:
    """The pipeline that a value of `algorithm.workflow_type` selects."""
    for name, entry in PIPELINES.items():
        if entry.workflow_type and entry.workflow_type == workflow_type:
            return name
    return None


def names_in_defaults(root: yaml.Node | None) -> list[str]:
    """The names in the `defaults` of a YAML file; "" for an entry that is none."""
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    chosen = next((value for name, value in pairs if name.value == "defaults"), None)
    if chosen is None:
        return []

    entries = chosen.value if isinstance(chosen, yaml.SequenceNode) else [chosen]

    return [entry.value if isinstance(entry, yaml.ScalarNode) else "" for entry in entries]


def is_preset(where: str) -> bool:
    """Whether an origin, "file:line", is a preset of the package."""
    return where.rpartition(":")[0] in map(display, preset_files().values())


def is_given(where: str) -> bool:
    """Whether a user set it: it is neither a default nor a preset's."""
    return where != "default" and not is_preset(where)


def display(path: Path) -> str:
    """A file's name in messages: `presets/NAME.yaml` or `methods/NAME.py` for a preset, else
    relative to the working directory."""
    if path.parent in (PRESETS, METHODS):
        return f"{path.parent.name}/{path.name}"
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)


def read_settings(path: Path, prefix: str, root: yaml.Node | None) -> list[Setting]:
    """Every mapping entry of a YAML file, groups before their entries. prefix: of their names.
    root: the file's document.

    Raises ConfigError if the file is not a readable mapping or names a key twice.
    """
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            [
                Problem(
                    ((display(path), "line 1"),),
                    "is not a mapping of keys",
                    "write key: value lines",
                )
            ]
        )
    if twice := [*_named_twice(root, "", path)]:
        raise ConfigError(twice)

    _flatten_merges(root, yaml.SafeLoader(""))
    directive = dotted(prefix, "defaults")
    return [
        entry
        for entry in _entries(root, prefix, path)
        if not f"{entry.key}.".startswith(f"{directive}.")
    ]


def settings_of_value(key: str, value: object, where: str) -> Iterator[Setting]:
    """The settings of a command-line value, which may be a mapping."""
    below = value.items() if isinstance(value, dict) else ()
    yield Setting(key, where, is_group=bool(below), value=NOT_GIVEN if below else value)
    for name, item in below:
        yield from settings_of_value(dotted(key, str(name)), item, where)


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError, path: Path) -> Problem:
    """The problem for a YAML error, with file and line; `path` if the error names no file."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(
            ((display(path), "the file"),), f"cannot be read: {error}", "save it as UTF-8 text"
        )

    mark = error.problem_mark or error.context_mark
    where = "the file"
    if mark:
        where = f"line {mark.line + 1}, column {mark.column + 1}"

    advice = (
        "check that line and the one above: keys of one group start in the same column, after "
        'spaces and not tabs; "${...}" is in quotes; tags (!...) are not supported'
    )
    return Problem(((display(path), where),), f"is not valid YAML: {error.problem}", advice)


def read_yaml(path: Path) -> str:
    """The text of a YAML file, or of the settings of a method's file. Raises ConfigError if there
    are none."""
    text = read_file(path, max_bytes=MAX_YAML_BYTES).decode("utf-8")
    if path.suffix != ".py":
        return text

    place = "the file"
    advice = 'write SETTINGS = """, keys as in a YAML file, and """ at its top'
    try:
        settings = MethodFile(text).settings
    except SyntaxError as error:
        place = f"line {error.lineno}"
        what = f"is not Python: {error.msg}"
        advice = "correct that line"
    else:
        if settings is not None:
            return settings
        what = "is no method: it has no SETTINGS"

    raise ConfigError([Problem(((display(path), place),), what, advice)])


def read_node(path: Path) -> yaml.Node | None:
    """The document of a file of settings. Raises ConfigError if it is unreadable or too large."""
    try:
        root = yaml.SafeLoader(read_yaml(path)).get_single_node()
        check_aliases(root)
        return root
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = yaml_problem(error, path)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        problem = Problem(
            ((display(path), "the file"),), what, "check what it is and its permissions"
        )

    raise ConfigError([problem])


def _named_twice(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[Problem]:
    first_lines: dict[str, int] = {}
    for name_node, value in node.value:
        name = dotted(prefix, str(name_node.value))
        line = name_node.start_mark.line + 1

        if name in first_lines:
            what = f"was already set in line {first_lines[name]}"
            yield Problem(((name, f"{display(path)}:{line}"),), what, "keep one of the two lines")

        first_lines[name] = line
        if isinstance(value, yaml.MappingNode):
            yield from _named_twice(value, name, path)


def _flatten_merges(node: yaml.MappingNode, loader: yaml.SafeLoader) -> None:
    loader.flatten_mapping(node)
    for _, value in node.value:
        if isinstance(value, yaml.MappingNode):
            _flatten_merges(value, loader)


def _entries(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[Setting]:
    for name_node, value in node.value:
        name = dotted(prefix, str(name_node.value))
        where = f"{display(path)}:{name_node.start_mark.line + 1}"
        is_group = isinstance(value, yaml.MappingNode) and bool(value.value)
        given = NOT_GIVEN if is_group else _plain_value(value)
        yield Setting(name, where, is_group, "." in str(name_node.value), given)
        if isinstance(value, yaml.MappingNode):
            yield from _entries(value, name, path)


def _plain_value(node: yaml.Node) -> object:
    """The value in Python; OmegaConf rejects a tag that is not read here."""
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError):  # or a number of thousands of digits
        return NOT_GIVEN
