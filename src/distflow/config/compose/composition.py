"""Composes presets, files and overrides, and records the settings of each."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
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
    Setting,
    base_preset,
    display,
    names_in_defaults,
    preset_files,
    read_node,
    read_settings,
    read_yaml,
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
    an unknown key. base: the preset that the file builds on without naming it.
    """

    values: dict[str, object] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    failure: Problem | None = None
    base: str | None = None


def find_source(preset_or_file: str) -> Path:
    """The file of a preset or a path. Raises ConfigError with the nearest preset."""
    presets = preset_files()
    if preset_or_file in presets:
        return presets[preset_or_file]

    path = Path(preset_or_file).expanduser()
    if path.is_file() and path.suffix in (".yaml", ".py"):
        return path.resolve()

    names = ", ".join(presets)
    what = "is neither a preset nor a file"
    if "=" in preset_or_file:
        what = "is no preset"
    elif path.exists():
        what = "is no .yaml file and no .py file of a method"

    meant = did_you_mean(preset_or_file, presets)
    if (path / _CONFIG_OF_A_RUN).is_file():
        meant = f"did you mean {path / _CONFIG_OF_A_RUN}? "
    advice = f"{meant}name a .yaml file, a method's .py file, or one of the presets {names}"
    raise ConfigError([Problem(((f"'{preset_or_file}'", COMMAND_LINE),), what, advice)])


@dataclass(frozen=True)
class _File:
    """A file of settings that takes part."""

    path: Path

    prefix: str
    """Of its keys; empty for a file at the top."""

    settings: list[Setting]


def compose(
    source: Path,
    overrides: Sequence[str],
    otherwise: str,
    register: Callable[[Sequence[Setting]], None],
) -> Composition:
    """What the file builds on, then the file, then the overrides. Raises ConfigError for a broken
    file.

    otherwise: the preset that a file builds on if it names none and its keys select no built-in
    pipeline. register: adds the groups of keys that the settings' modules define.
    """
    result = Composition()
    parsed = _read_overrides(overrides, result)
    try:
        files = [*_files(source)]
        result.base = _find_base(source, files, parsed, otherwise)
        if result.base is not None:
            files = [*_files(preset_files()[result.base]), *files]
    except ConfigError as error:
        raise ConfigError([*result.problems, *error.problems]) from None

    for file in files:
        result.settings += file.settings
    methods = [file.path for file in files if file.path.suffix == ".py"]
    if own := [str(path) for path in methods if path not in preset_files().values()]:
        parsed.append(_import_of(own, [*result.settings, *_set_by(parsed)]))
    register([*result.settings, *_set_by(parsed)])

    applied = [*_applied(parsed, result)]
    try:
        _merge(files, applied, result)
    except YAMLError as error:
        result.failure = yaml_problem(error, source)
    except InterpolationResolutionError as error:
        result.failure = _unresolved(error, result.settings)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        # The last two occur if an override sets a key below a list or a number in the file.
        reason = _reason(error.__cause__ or error)
        result.failure = Problem(((display(source), "its composition"),), reason)

    return result


def _import_of(methods: Sequence[str], settings: Sequence[Setting]) -> Override:
    """The user's modules, and after them the user's methods, whose files register their parts."""
    chosen: list[object] = []
    for setting in settings:
        if setting.key == "trainer.imports":
            given = setting.value or []
            chosen = given if isinstance(given, list) else [given]
    return Override("trainer.imports", [*chosen, *methods])


def _merge(files: Sequence[_File], overrides: Sequence[Override], result: Composition) -> None:
    """Fill in the values. Raises what OmegaConf raises."""
    ours = OmegaConf.create({})
    for file in files:
        ours.merge_with(_layer(file.path, file.prefix))
    for override in overrides:
        _apply(ours, override)
    composed = OmegaConf.create(_plain_defaults())
    composed.merge_with(ours)
    check_interpolations(_plain(composed, resolve=False))
    result.values = _plain(composed)


def _set_by(overrides: Sequence[Override]) -> list[Setting]:
    found: list[Setting] = []
    for override in overrides:
        if not override.deletes:
            found += settings_of_value(override.key, override.value, COMMAND_LINE)
    return found


def _files(source: Path) -> Iterator[_File]:
    """The file and what it builds on, in the order in which they take effect. A name in `defaults`
    is a YAML file next to the source, a preset, or a method next to the source; one in a folder
    below has the folder's name as its prefix. Raises ConfigError."""
    presets = preset_files()
    names = ", ".join(presets)

    def wrong(what: str) -> ConfigError:
        advice = (
            f"name presets ({names}) or files next to this one, without .yaml, in a list: "
            "defaults: [grpo, _self_]"
        )
        return ConfigError([Problem(((display(source), "defaults"),), what, advice)])

    def follow(path: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[_File]:
        if path in above:
            raise wrong("builds on itself")

        root = read_node(path)
        found = names_in_defaults(root)
        if not all(found):
            raise wrong("are no list of names")

        if "_self_" not in found:
            found.append("_self_")
        folder = prefix.replace(".", "/")

        for name in found:
            if name == "_self_":
                yield _File(path, prefix, read_settings(path, prefix, root))
                continue

            within = f"{folder}/{name}" if folder else name
            file = source.parent / f"{within}.yaml"
            if not file.is_file():
                file = presets.get(within, file.with_suffix(".py"))
            if not file.is_file():
                raise wrong(f"name '{name}', which is no preset and no file")
            below = within.rpartition("/")[0].replace("/", ".")
            yield from follow(file, below, (*above, path))

    yield from follow(source, "", ())


def _layer(path: Path, package: str) -> DictConfig:
    """The settings of a file below its package."""
    read = OmegaConf.load(StringIO(read_yaml(path)))
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


def _find_base(
    source: Path, files: Sequence[_File], overrides: Sequence[Override], otherwise: str
) -> str | None:
    """The preset that a user's file builds on if it names none: that of the pipeline that its keys
    select, else `otherwise`. None for a file that names a preset or, like that of a run, sets every
    key. Raises ConfigError if a neighbouring file would be taken for the preset."""
    values: dict[str, object] = {}
    for file in files:
        values |= {setting.key: setting.value for setting in file.settings}

    for override in overrides:
        if override.deletes:
            values.pop(override.key, None)

    values |= {setting.key: setting.value for setting in _set_by(overrides)}
    is_whole = schema_keys().keys() <= values.keys()
    if is_whole or any(file.path in preset_files().values() for file in files):
        return None

    base = base_preset({key: values.get(key) for key in PIPELINE_KEYS}, otherwise)
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
    if info:
        for arm in info.arms:
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
        if isinstance(value, list) and name.isdecimal():
            value = dict(enumerate(value)).get(int(name))
        else:
            value = value.get(name) if isinstance(value, dict) else None

    return value


def _references(path: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The places that a string may refer to; for `${a.${b}}` all of `a`. Leading dots: from the
    string's group."""
    for inner in text.split("${")[1:]:
        for name in re.split("[:,]", inner.partition("}")[0]):
            names = re.findall(r"[^\s.\[\]]+", name)
            dots = len(name.lstrip()) - len(name.lstrip(" ."))
            if dots:
                names = [*path[: max(len(path) - dots, 0)], *names]
            yield tuple(names)


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
