"""Composes presets, files and overrides, and records the settings of each."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from distflow.config.compose.override_grammar import (
    Override,
    Unreadable,
    parse_override,
)
from distflow.config.compose.setting_origins import (
    COMMAND_LINE,
    PIPELINE_KEYS,
    PRESETS,
    Setting,
    base_preset,
    display,
    names_in_defaults,
    only_own_files,
    preset_names,
    read_node,
    read_settings,
    settings_of_value,
    yaml_problem,
)
from distflow.config.compose.typed_values import did_you_mean, nested
from distflow.config.compose.unknown_keys import is_known
from distflow.config.keys.schema import schema_keys
from distflow.errors import ConfigError, Problem

_MAX_TEXT = 1_000_000
_CONFIG_OF_A_RUN = "config.yaml"  # relative to the run's folder

_WRITTEN = (
    "write key=value, without dashes and without spaces around =, and quote lists, mappings and "
    "texts with spaces or commas for the shell: 'key=[a, b]', 'key={a: 1}', 'key=\"a, b\"'"
)


@dataclass
class Composition:
    """The composed plain values, every setting in the order in which it took effect, and problems.

    refused: keys whose override cannot be read. failure: why there are no values; often caused by
    an unknown key.
    """

    values: dict[str, object] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    failure: Problem | None = None


def find_source(preset_or_file: str) -> Path:
    """The YAML file of a preset or a path. Raises ConfigError with the nearest preset."""
    if preset_or_file in preset_names():
        return PRESETS / f"{preset_or_file}.yaml"
    path = Path(preset_or_file).expanduser()
    if path.is_file() and path.suffix == ".yaml":
        return path.resolve()
    names = ", ".join(preset_names())
    what = "is neither a preset nor a file"
    if "=" in preset_or_file:
        what = "is no preset"
    elif path.exists():
        what = "is no .yaml file"
    meant = did_you_mean(preset_or_file, preset_names())
    if (path / _CONFIG_OF_A_RUN).is_file():
        meant = f"did you mean {path / _CONFIG_OF_A_RUN}? "
    advice = f"{meant}name a .yaml file, or one of the presets {names}"
    raise ConfigError([Problem(((f"'{preset_or_file}'", COMMAND_LINE),), what, advice)])


def compose_values(source: Path, overrides: Sequence[str], base: str | None = None) -> Composition:
    """Defaults, then what the file builds on, then the file, then the overrides. Raises ConfigError
    for a broken file.

    base: a preset that the file builds on without naming it; see `find_base`.
    """
    result = Composition()
    parsed = _read_overrides(overrides, result)
    try:
        layers = [*_files_below(source, base)]
        for path, package in layers:
            result.settings += read_settings(path, package)
    except ConfigError as error:
        raise ConfigError([*result.problems, *error.problems]) from None
    applied = [*_applied(parsed, result)]
    try:
        composed = OmegaConf.create(_plain_defaults())
        ours = OmegaConf.create({})
        for path, package in layers:
            ours.merge_with(_layer(path, package))
        for override in applied:
            _apply(ours, override)
        composed.merge_with(ours)
        check_interpolations(_plain(composed, resolve=False))
        result.values = _plain(composed)
    except YAMLError as error:
        result.failure = yaml_problem(error, source)
    except InterpolationResolutionError as error:
        result.failure = _unresolved(error, result.settings)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        # The last two occur if an override sets a key below a list or a number in the file.
        reason = _reason(error.__cause__ or error)
        result.failure = Problem(((display(source), "its composition"),), reason)
    return result


def _files_below(source: Path, base: str | None) -> Iterator[tuple[Path, str]]:
    """Each YAML file with its package, the prefix of its keys, in the order in which they take
    effect. A name in `defaults` is a file next to the source, or a preset; one in a folder below
    has the folder's name as its prefix. Raises ConfigError."""
    names = ", ".join(preset_names())

    def wrong(what: str) -> ConfigError:
        advice = (
            f"name presets ({names}) or files next to this one, without .yaml, in a list: "
            "defaults: [grpo, _self_]"
        )
        return ConfigError([Problem(((display(source), "defaults"),), what, advice)])

    def follow(path: Path, package: str, above: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
        if path in above:
            raise wrong("builds on itself")
        found = names_in_defaults(read_node(path))
        if not all(found):
            raise wrong("are no list of names")
        for name in found if "_self_" in found else [*found, "_self_"]:
            if name == "_self_":
                yield path, package
                continue
            within = "/".join([*filter(None, [package.replace(".", "/")]), name])
            places = [parent / f"{within}.yaml" for parent in (source.parent, PRESETS)]
            file = next((place for place in places if place.is_file()), None)
            if file is None:
                raise wrong(f"name '{name}', which is no preset and no file")
            yield from follow(file, within.rpartition("/")[0].replace("/", "."), (*above, path))

    if base is not None:
        yield from follow(PRESETS / f"{base}.yaml", "", ())
    yield from follow(source, "", ())


def _layer(path: Path, package: str) -> DictConfig:
    """The content of a YAML file below its package."""
    read = OmegaConf.load(path)
    if not isinstance(read, DictConfig):
        return OmegaConf.create({})
    read.pop("defaults", None)
    if not package:
        return read
    layer = OmegaConf.create({})
    OmegaConf.update(layer, package, read)
    return layer


def _apply(composed: DictConfig, override: Override) -> None:
    """Set or delete the key. Every key has a default, so `key=`, `+key=` and `++key=` are the
    same."""
    if not override.deletes:
        OmegaConf.update(composed, override.key, override.value, merge=True, force_add=True)
        return
    group, _, name = override.key.rpartition(".")
    place = OmegaConf.select(composed, group) if group else composed
    place.pop(name)


def _plain_defaults() -> dict[str, object]:
    """The schema's defaults as plain values, without lists and mappings, which settings replace as
    a whole."""
    scalars = {
        name: info
        for name, info in schema_keys().items()
        if not isinstance(info.default, dict | tuple | list)
    }
    return nested({name: info.spec.plain(info.default) for name, info in scalars.items()})


def _unresolved(error: InterpolationResolutionError, settings: Sequence[Setting]) -> Problem:
    what = (
        (error.msg or str(error))
        .splitlines()[0]
        .removeprefix("KeyError raised while resolving interpolation: ")
    )
    subject = str(error.full_key or "${...}")
    advice = "name an existing key, e.g. ${trainer.seed}, or a variable: ${oc.env:NAME,value}"
    places = ["default", *(setting.where for setting in settings if setting.key == subject)]
    return Problem(((subject, places[-1]),), what, advice)


def find_base(source: Path, composed: Composition, otherwise: str) -> str | None:
    """The preset that a user's file builds on if it names none: that of the pipeline that its keys
    select, else `otherwise`. None for a file that names a preset or, like that of a run, sets every
    key. Raises ConfigError if a neighbouring file would be taken for the preset."""
    is_whole = schema_keys().keys() <= {setting.key for setting in composed.settings}
    if source.parent == PRESETS or composed.failure or is_whole or not only_own_files(source):
        return None
    values = OmegaConf.create(composed.values)
    base = base_preset({key: OmegaConf.select(values, key) for key in PIPELINE_KEYS}, otherwise)
    if (source.parent / f"{base}.yaml").exists():
        place = ((display(source), "defaults"),)
        what = (
            f"are missing, and {base}.yaml next to it has the name of the preset that it would "
            "build on"
        )
        raise ConfigError(
            [Problem(place, what, "rename that file, or name the intended base under defaults")]
        )
    return base


def _read_overrides(lines: Sequence[str], result: Composition) -> list[Override]:
    parsed = []
    for line in lines:
        try:
            override = parse_override(line)
        except Unreadable as error:
            if _takes_text(line):
                parsed.append(Override(_key_of(line), line.partition("=")[2]))
            else:
                _refuse(result, line, f"cannot be read: {error}", _WRITTEN)
            continue
        if re.search("[@/:]", override.key):
            advice = "write key=value; a file names its base under defaults:"
            _refuse(result, line, "names a file, not a key", advice)
        else:
            parsed.append(override)
    return parsed


def _key_of(line: str) -> str:
    return line.partition("=")[0].lstrip("+~")


def _takes_text(line: str) -> bool:
    """Whether the line's value, which the grammar does not allow, is meant as it is: its key takes
    a text, alone or as a list of one, and it looks like neither a list nor a quoted text."""
    value = line.partition("=")[2]
    if not value or value[0] in "'\"[ =":
        return False
    info = schema_keys().get(_key_of(line))
    for arm in info.arms if info else ():
        if arm is str or (get_origin(arm) is tuple and get_args(arm)[:1] == (str,)):
            return True
    return False


def _refuse(result: Composition, line: str, what: str, advice: str) -> None:
    result.problems.append(Problem(((f"'{line}'", COMMAND_LINE),), what, advice))
    result.refused.add(_key_of(line))


def check_interpolations(values: dict[str, object]) -> None:
    """Raises ValueError if strings expand too far through ${...}: forty lines with two references
    each give 2^40."""
    known: dict[tuple[str, ...], int] = {}

    def size(path: tuple[str, ...]) -> int:
        """The length of a value once expanded, counting everything that its references may mean."""
        if path not in known:
            known[path] = 0  # self-reference: OmegaConf reports it
            value = _at(values, path)
            if isinstance(value, dict | list):
                names = value if isinstance(value, dict) else range(len(value))
                known[path] = sum(size((*path, str(name))) for name in names)
            elif isinstance(value, str):
                known[path] = len(value) + sum(map(size, _references(path, value)))
        return known[path]

    if size(()) > _MAX_TEXT:
        raise ValueError(
            f"with ${{...}} expanded, its strings have more than {_MAX_TEXT:,} characters together"
        )


def _at(value: object, path: tuple[str, ...]) -> object:
    for name in path:
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(name)) if name.isdecimal() else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _references(path: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The places that a string may refer to; for `${a.${b}}` all of `a`. Leading dots: from the
    string's group."""
    for inner in text.split("${")[1:]:
        for name in re.split("[:,]", inner.partition("}")[0]):
            dots = len(name.lstrip()) - len(name.lstrip(" ."))
            names = re.findall(r"[^\s.\[\]]+", name)
            yield (*(path[: max(len(path) - dots, 0)] if dots else ()), *names)


def _plain(composed: object, resolve: bool = True) -> dict[str, object]:
    values = OmegaConf.to_container(composed, resolve=resolve)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _applied(parsed: Sequence[Override], result: Composition) -> Iterator[Override]:
    """The overrides that take effect; each is recorded as a setting, and a problem if it deletes
    what was not set."""
    for override in parsed:
        key = override.key
        if not override.deletes:
            result.settings += settings_of_value(key, override.value, COMMAND_LINE)
            if is_known(key):
                yield override
        elif any(setting.key == key for setting in result.settings):
            result.deleted.append(key)
            yield override
        else:
            advice = "remove this override: the key has its default already"
            result.problems.append(
                Problem(((f"~{key}", COMMAND_LINE),), "there is nothing to remove", advice)
            )


def _reason(error: BaseException) -> str:
    first = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return first.partition(" expecting ")[0]
