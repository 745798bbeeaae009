"""`distflow.train`: a run from Python, otherwise the one that the command line would start."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from distflow.api.given import Given, Reward, Rows
from distflow.api.overrides import Overrides
from distflow.api.reading import PresetOrConfig, make_spec_of, read, say, settings_kept
from distflow.api.run import Run
from distflow.config.functions import load
from distflow.config.names import LAUNCHERS
from distflow.config.resuming import check_keys

if TYPE_CHECKING:
    from distflow.runtime.spec import Launch


def train(
    preset_or_config: PresetOrConfig,
    overrides: Overrides = (),
    *,
    data: Rows | None = None,
    val_data: Rows | None = None,
    reward: Reward | None = None,
    on_step: Callable[[int, dict[str, float]], object] | None = None,
    on_validation: Callable[[int, dict[str, float]], object] | None = None,
    on_save: Callable[[int, Path], object] | None = None,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
) -> Run:
    """Train to the end, or until Ctrl-C or a notebook's interrupt, which saves; the same call goes on from there.

    preset_or_config: a preset's name, a YAML file, or a dict of keys, nested or dotted, which builds on the preset that
    it names as `defaults` (`grpo`, if it names none).
    overrides: a dict of the same kind, or lines "key=value" as the command line takes them.
    data, val_data: rows in place of `data.train_files` and `data.val_files`: a list of dicts, a `datasets.Dataset`, a
    pandas `DataFrame`, an iterator, a function that returns one of them; or, as a text, what the keys take.
    reward: a function that judges answers: plain, async or batched (`docs/python.md`).
    on_step, on_validation: called with (step, metrics by their names). on_save: with (step, folder of the checkpoint).
    resume, allow_change: as `--resume` and `--allow-change` of the command line.
    Raises UserError or PipelineError for what is to be changed, with the message of the command line; TrustError where
    a check fails; NodeError where a node does.
    """
    from distflow.runtime.callbacks import Callbacks

    callbacks = Callbacks(on_step, on_validation, on_save)
    given = Given(data, val_data, reward)
    loaded = read(preset_or_config, overrides, given, resume)
    check_keys(allow_change)
    with settings_kept():
        spec = make_spec_of(given, loaded)
        launch = cast("Launch", load(LAUNCHERS[spec.options.launcher].target))
        launch(spec, allow_change=tuple(allow_change), say=say, callbacks=callbacks, embedded=True)
    run = Run(spec.run_dir)
    for line in run.summary():
        say(line)
    return run
