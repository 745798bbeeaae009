"""From what was given in Python to the spec of a run, as the command line would make it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.api.given import Given
from distflow.api.overrides import Overrides, to_lines
from distflow.config import ConfigError, Loaded, Problem, UserError, describe, load_config
from distflow.config.paths import NEEDED_TO_TRAIN
from distflow.config.resuming import resume_override
from distflow.config.sources import COMMAND_LINE
from distflow.data import generators
from distflow.observe.claim import claimed
from distflow.observe.text import visible

if TYPE_CHECKING:
    from distflow.runtime.spec import Spec

PresetOrConfig = str | Path | Mapping[str, object]


def read(preset_or_config: PresetOrConfig, overrides: Overrides, given: Given, resume: str | None) -> Loaded:
    """The checked config, with the files of what was given in it. Raises UserError."""
    preset, lines = preset_and_lines(preset_or_config, overrides)
    say(f"distflow {__version__} · {preset}")
    loaded = given.named_in(_load(preset, [*lines, *given.lines(lines), *resume_override(resume)], given))
    for line in loaded.notes:
        say(line)
    return loaded


def make_spec_of(given: Given, loaded: Loaded) -> "Spec":
    """Write what was given into the run's folder, and make the spec. Raises UserError or PipelineError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, of a notebook without its widgets
        from distflow.pipelines.code import named_code
        from distflow.pipelines.spec import make_spec
    for line in named_code(loaded.config):
        say(f"your code: {line}")
    _keep(given, loaded)
    spec = make_spec(loaded, say)
    for line in describe(spec.config):
        say(line)
    return spec


def preset_and_lines(config: str | Path | Mapping[str, object], overrides: Overrides) -> tuple[str, list[str]]:
    """Raises UserError for a dict that builds on no preset, or on several."""
    if not isinstance(config, Mapping):
        return str(config), to_lines(overrides)
    values = dict(config)
    named = values.pop("defaults", "grpo")
    presets = [name for name in (named if isinstance(named, list | tuple) else [named]) if name != "_self_"]
    if len(presets) != 1 or not isinstance(presets[0], str):
        raise UserError(f"defaults is {named!r}: name the one preset that the config builds on")
    return presets[0], [*to_lines(values), *to_lines(overrides)]


def _load(preset: str, lines: Sequence[str], given: Given) -> Loaded:
    try:
        return load_config(preset, lines, needed=NEEDED_TO_TRAIN)
    except ConfigError as error:
        raise ConfigError([_in_python(problem, given) for problem in error.problems]) from None


def _in_python(problem: Problem, given: Given) -> Problem:
    """There is no command line here, and the files of what was given are still to come."""
    places = tuple((given.shown(what), "given" if where == COMMAND_LINE else where) for what, where in problem.places)
    return replace(problem, places=places)


def _keep(given: Given, loaded: Loaded) -> None:
    """Write what was given into the run's folder."""
    from distflow.runtime.checkpoint import CheckpointStore
    from distflow.runtime.disk import writing_to
    from distflow.runtime.resume import CHECKPOINTS

    trainer = loaded.config.trainer
    with claimed(trainer.run_dir), writing_to(trainer.run_dir):
        resuming = trainer.resume_mode != "never" and CheckpointStore(trainer.run_dir / CHECKPOINTS).exists()
        given.keep(loaded.config, resuming, say)


@contextmanager
def settings_kept() -> Iterator[None]:
    """What a run sets for the whole process is its caller's again behind it: random generators, threads of torch."""
    import torch

    threads = torch.get_num_threads()
    try:
        with generators.lent(generators.states()):
            yield
    finally:
        torch.set_num_threads(threads)


def say(line: str) -> None:
    print(visible(line), flush=True)
