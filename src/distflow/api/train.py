"""`distflow.train`: starts the same run from Python that the command line would start."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from distflow import __version__
from distflow.api.arguments_to_config import Overrides, PythonInputs, Reward, Rows, key_of, to_lines
from distflow.api.load_run import Run
from distflow.config import Config, ConfigError, Loaded, UserError, describe, load_config
from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
from distflow.config.compose.setting_origins import base_preset
from distflow.config.derived_settings import check_keys, launch_target, resume_override
from distflow.data import global_random_states
from distflow.errors import blaming, called_from_python
from distflow.import_target import load
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import claimed

if TYPE_CHECKING:
    from distflow.runtime.spec import Launch, Spec

PresetOrConfig = str | Path | Mapping[str, object]


def read(
    preset_or_config: PresetOrConfig, overrides: Overrides, inputs: PythonInputs, resume: str | None
) -> Loaded:
    """The checked config, with the files for rows and reward. Raises UserError."""
    preset, lines = preset_and_lines(preset_or_config, overrides)
    say(f"distflow {__version__} · {preset}")

    lines = [*lines, *inputs.lines(lines), *resume_override(resume)]
    try:
        loaded = load_config(preset, lines, needed=NEEDED_TO_TRAIN)
        if loaded.config.trainer.allocation == "auto":
            from distflow.launch.plans.run_planner import searched_allocation

            loaded = load_config(
                preset, [*lines, *searched_allocation(preset, lines, say)], needed=NEEDED_TO_TRAIN
            )
    except ConfigError as error:
        raise ConfigError([inputs.in_python(problem) for problem in error.problems]) from None

    loaded = inputs.with_files(loaded)
    for line in loaded.notes:
        say(line)
    return loaded


def make_spec_of(inputs: PythonInputs, loaded: Loaded, *, has_data: bool = True) -> "Spec":
    """Write rows and reward into the run's folder, make the spec, and try the reward. Raises
    UserError or PipelineError."""
    with warnings.catch_warnings():
        # tqdm's warning in a notebook without widgets
        warnings.filterwarnings("ignore", message="IProgress not found")
        from distflow.launch.dry_run_of_user_code import try_users_code
        from distflow.launch.make_spec import make_spec

    _write(inputs, loaded.config)
    try:
        spec = make_spec(loaded, say)
    except UserError as error:
        # without effect
        if inputs.reward is None or "custom_reward_function.path" not in getattr(error, "keys", ()):
            raise
        what = "remove it, or give the workflow a parameter `reward_fn` and await that"
        raise UserError(f"reward: nothing in this pipeline calls it: {what}") from error

    for line in describe(spec.config):
        say(line)
    if has_data:
        spec = try_users_code(spec, say)
    return spec


def _write(inputs: PythonInputs, config: Config) -> None:
    from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
    from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS
    from distflow.runtime.run_errors import writing_to

    trainer = config.trainer
    with claimed(trainer.run_dir), writing_to(trainer.run_dir):
        resuming = (
            trainer.resume_mode != "never"
            and CheckpointStore(trainer.run_dir / CHECKPOINTS).exists()
        )
        inputs.write(config, resuming, say)


def preset_and_lines(
    config: str | Path | Mapping[str, object], overrides: Overrides
) -> tuple[str, list[str]]:
    """The preset, and the rest as lines. Raises UserError for a dict that builds on no preset, or
    on several."""
    if not isinstance(config, Mapping):
        return str(config), to_lines(overrides)

    values = dict(config)
    named = values.pop("defaults", None)
    lines = [*to_lines(values), *to_lines(overrides)]

    if named is None:
        texts = {key_of(line): line.partition("=")[2].strip("'\"") for line in lines}
        named = base_preset({key: text for key, text in texts.items() if text != "null"})

    several = named if isinstance(named, list | tuple) else [named]
    presets = [name for name in several if name != "_self_"]
    if len(presets) != 1 or not isinstance(presets[0], str):
        raise UserError(f"defaults is {named!r}: name the single preset that the config builds on")

    return presets[0], lines


@contextmanager
def claimed_for_a_run(run_dir: Path) -> Iterator[None]:
    """Restore process-wide state that a run sets: random generators, torch's threads and attention,
    the umask."""
    import torch

    threads = torch.get_num_threads()
    by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with claimed(run_dir), global_random_states.lent():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(by_cudnn)


def say(line: str) -> None:
    print(escape_control(line), flush=True)


@called_from_python()
def train(
    preset_or_config: PresetOrConfig,
    overrides: Overrides = (),
    *,
    data: Rows | None = None,
    val_data: Rows | None = None,
    reward: Reward | None = None,
    advantage: Callable[..., object] | None = None,
    loss: Callable[..., object] | None = None,
    pipeline: Callable[..., object] | None = None,
    workflow: Callable[..., object] | None = None,
    on_step: Callable[[int, dict[str, float]], object] | None = None,
    on_validation: Callable[[int, dict[str, float]], object] | None = None,
    on_save: Callable[[int, Path], object] | None = None,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
) -> Run:
    """Train to the end, or until Ctrl-C or a notebook's interrupt, which saves; the same call
    resumes from there.

    preset_or_config: a preset's name, a YAML file, or a dict of nested or dotted keys, which builds
    on the preset in its `defaults`, else on that of the pipeline that its keys select, else on
    `grpo`. overrides: a dict of the same kind, or lines "key=value" as on the command line. data,
    val_data: rows in place of `data.train_files` and `data.val_files`: a list of dicts, a
    `datasets.Dataset`, a pandas `DataFrame`, an iterator, or a function that returns one of them;
    or a str, the value of the key. reward: a function that scores responses: sync, async or batched
    (`docs/python.md`). advantage, loss: an advantage estimator and a policy loss, as accepted by
    their decorators. pipeline: a function that builds one. workflow: a function or class for
    episodes of several turns (`docs/workflows.md`). on_step, on_validation: called with (step,
    metrics by name). on_save: called with (step, checkpoint folder). resume, allow_change: the same
    as `--resume` and `--allow-change` on the command line. Raises UserError or PipelineError for a
    user's mistake, with the message of the command line; TrustError if a check fails; NodeError if
    a node fails.
    """
    from distflow.runtime.callbacks import Callbacks
    from distflow.runtime.spec import LaunchOptions

    callbacks = Callbacks(on_step, on_validation, on_save)
    inputs = PythonInputs(data, val_data, reward, advantage, loss, pipeline, workflow)
    loaded = read(preset_or_config, overrides, inputs, resume)
    check_keys(allow_change)

    with claimed_for_a_run(loaded.config.trainer.run_dir):
        spec = make_spec_of(inputs, loaded)
        launch = cast("Launch", load(launch_target(spec.config)))
        outcome = launch(spec, LaunchOptions(tuple(allow_change), say, callbacks, embedded=True))

    run = Run(spec.run_dir)
    for line in [] if outcome is None else outcome.lines():
        say(line)
    return run


def train_several(
    runs: Mapping[str, Mapping[str, Any]], overrides: Overrides = ()
) -> dict[str, Run]:
    """Train several pipelines at once, each with its own data, model, rewards, processes and share
    of the devices, as `distflow train` does with several configs. Returns the runs by name; the
    same call resumes them.

    runs: arguments of `train` by run name: `preset_or_config`, `overrides`, data, functions, but no
    callbacks, which would run elsewhere. overrides: for all runs. Raises UserError or PipelineError
    for a mistake, before any run starts, and RuntimeError if one fails; the others continue to
    their end.
    """
    from distflow.launch.plan_concurrent_runs import SeveralOptions, check_side_by_side, run_several

    read_runs = dict[str, tuple[PythonInputs, Loaded, list[str]]]()
    for name, arguments in runs.items():
        with blaming(name):
            given = dict(arguments)
            preset, lines = preset_and_lines(
                given.pop("preset_or_config", {}), given.pop("overrides", ())
            )
            lines = [*lines, *to_lines(overrides)]
            inputs = PythonInputs(**given)
            read_runs[name] = inputs, read(preset, lines, inputs, None), [preset, *lines]

    check_side_by_side({name: loaded.config for name, (_, loaded, _) in read_runs.items()})
    for name, (inputs, loaded, words) in read_runs.items():
        with blaming(name):
            _write(inputs, loaded.config)
            words += inputs.file_lines(loaded.config)

    commands = {name: words for name, (_, _, words) in read_runs.items()}
    planned, ended = run_several(commands, SeveralOptions(say=say, embedded=True))
    if ended.failed:
        raise RuntimeError(
            f"{', '.join(ended.failed)} failed, as the last lines of each say: the same call "
            "resumes it"
        )

    return {run.name: Run(run.run_dir) for run in planned}
