"""Makes the spec of a run from its config. Everything that can be wrong with a run is checked,
cheap things first."""

from collections.abc import Callable
from functools import partial

from distflow.config import Loaded, UserError, to_yaml
from distflow.config.derived_settings import with_own_policies
from distflow.data.encoded_rows_file import EncodedRows, write_encoded
from distflow.data.sources import forget_rows
from distflow.errors import blaming
from distflow.graph import BoundPipeline
from distflow.launch.data_sets import LazyRows, num_rows_of
from distflow.launch.devices import follow_machines
from distflow.launch.dry_run_of_user_code import try_algorithms
from distflow.launch.fit_config_to_files import (
    Data,
    Reading,
    fitted_to_files,
    follow_pipeline,
    read_config,
)
from distflow.launch.importable_code import check_pickles
from distflow.launch.report_head import description
from distflow.launch.run_facts import facts
from distflow.launch.run_folders.export_checkpoint import with_models_of_runs
from distflow.launch.select_pipeline import rebuild
from distflow.launch.spec_fields_from_config import (
    sampling_params,
    spec_settings,
    validation_params,
)
from distflow.launch.startup_messages import startup_lines
from distflow.launch.user_code import named_code
from distflow.observe.writing.run_folder import claimed
from distflow.observe.writing.timing import lasting
from distflow.runtime.run_errors import writing_to
from distflow.runtime.spec import Spec, ValidationSet
from distflow.training.optimizer import check_optimizer

Say = Callable[[str], None]


def make_spec(loaded: Loaded, say: Say) -> Spec:
    """say: called with a line for everything that is loaded, beginning with user code. Raises
    UserError or PipelineError."""
    if policies := with_own_policies(loaded.config):
        names = ", ".join(policies)
        raise UserError(
            f"dag.policies: set dag.policy to one of {names}; only `distflow train` trains all of "
            "them"
        )
    loaded, reading = _check_config(follow_machines(loaded), say)
    # First, since rows from Python code are stored in the folder, which another run may be using.
    with claimed(loaded.config.trainer.run_dir), lasting(say, "reading models and data"):
        loaded = with_models_of_runs(loaded, say)
        if loaded.config.trainer.resume_mode == "never":
            forget_rows(loaded.config.trainer.run_dir)
        loaded, reading, data = _check_files(loaded, reading, say)
        with writing_to(loaded.config.trainer.run_dir):
            spec = _spec(loaded, reading.pipeline, data)
        for warning in spec.warnings:
            say(f"warning: {warning}")
    check_pickles(spec)
    return spec


def check_run(loaded: Loaded) -> Loaded:
    """The config that a run would have. Makes the checks of `make_spec` that need neither weights
    nor the run's folder, and not those of other machines. Raises UserError or PipelineError."""

    def quiet(line: str) -> None: ...

    if loaded.config.trainer.launcher == "local":
        loaded = follow_machines(loaded)
    return _check_files(*_check_config(loaded, quiet), quiet)[0]


def _check_config(loaded: Loaded, say: Say) -> tuple[Loaded, Reading]:
    """What the config alone shows, and the user's code that it names."""
    said = named_code(loaded.config)
    for code in said:
        say(f"your code: {code}")
    loaded = follow_pipeline(loaded)
    for code in named_code(loaded.config):
        if code not in said:  # which a node names
            say(f"your code: {code}")
    reading = read_config(loaded)
    for note in try_algorithms(loaded.config, reading.pipeline):
        say(f"note: {note}")
    settings = loaded.config
    for role, optim in (
        ("actor_rollout_ref.actor", settings.actor_rollout_ref.actor),
        ("critic", settings.critic),
    ):
        with blaming(f"{role}.optim.optimizer"):
            check_optimizer(optim.optim.optimizer)
    return loaded, reading


def _check_files(loaded: Loaded, reading: Reading, say: Say) -> tuple[Loaded, Reading, Data]:
    """What the files of data and model show."""
    loaded, reading, data = fitted_to_files(loaded, reading)
    for line in startup_lines(loaded, reading, data):
        say(line)
    return loaded, reading, data


def _spec(loaded: Loaded, pipeline: BoundPipeline, data: Data) -> Spec:
    config = loaded.config
    run_dir = loaded.config.trainer.run_dir
    validation = []  # one set, or one for each domain with validation data, under its name
    for domain, prompts in data.validation.items():
        rows = EncodedRows(write_encoded(prompts, run_dir, f"val-{domain}" if domain else "val"))
        params = validation_params(config, sampling_params(config, domain))
        validation.append(ValidationSet(domain or "val", rows, *params))
    overlap = "" if config.data.allow_overlap else data.overlap()
    train = (
        data.train
        if isinstance(data.train, LazyRows)
        else EncodedRows(write_encoded(data.train, run_dir, "train"))
    )
    return spec_settings(config, pipeline, num_rows_of(config, data.train))(
        text=to_yaml(config),
        pipeline=partial(rebuild, config),
        rows=train,
        validation=tuple(validation),
        sampling=sampling_params(config),
        sampling_of={name: sampling_params(config, name) for name in config.data.domains},
        facts=facts(config, data),
        num_left_out={
            "train": 0
            if train is data.train
            else data.looked_at.report.num_left_out + len(data.broken),
            **{
                f"val {domain}": prompts.report.num_left_out
                for domain, prompts in data.validation.items()
            },
        },
        warnings=tuple(filter(None, [overlap])),
        description=description(loaded, data),
    )
