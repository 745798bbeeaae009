"""Makes the spec of a run from its config. Everything that can be wrong with a run is checked,
cheap things first."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.config import Config, Loaded, UserError
from distflow.config.derived_settings import with_own_policies
from distflow.data.encoded_prompts import PromptRow
from distflow.data.encoded_rows_file import EncodedRows, write_encoded
from distflow.data.python_rows import forget_rows
from distflow.errors import blaming
from distflow.launch.configured_models import compute_dtype
from distflow.launch.devices import follow_machines
from distflow.launch.dry_run_of_user_code import try_algorithms
from distflow.launch.importable_code import check_pickles
from distflow.launch.lazy_rows import LazyRows, num_rows_of
from distflow.launch.read_config import (
    Data,
    Reading,
    fitted_to_files,
    follow_pipeline,
    read_config,
)
from distflow.launch.report_head import description
from distflow.launch.rollout_engines import engine_dtype, shares_weights
from distflow.launch.run_facts import facts
from distflow.launch.run_folders.export_checkpoint import with_models_of_runs
from distflow.launch.run_settings import (
    sampling_params,
    settle_run,
    validation_params,
)
from distflow.launch.select_pipeline import rebuild, takes_policy_loss
from distflow.launch.startup_messages import startup_lines
from distflow.launch.user_code import named_code
from distflow.observe.writing.run_folder import claimed
from distflow.observe.writing.timing import lasting
from distflow.pipelines.nodes.objectives_from_config import is_anchored, loss_terms
from distflow.runtime.run_errors import writing_to
from distflow.runtime.spec import Spec, ValidationSet
from distflow.scheduling.row_sampler import try_sampler
from distflow.training.optimizer import check_optimizer

Say = Callable[[str], None]


def make_spec(loaded: Loaded, say: Say, trains: bool = True) -> Spec:
    """say: called with a line for everything that is loaded, beginning with user code. trains:
    false if the caller only validates. Raises UserError or PipelineError."""
    if policies := with_own_policies(loaded.config):
        names = ", ".join(policies)
        raise UserError(
            f"dag.policies: set dag.policy to one of {names}; only `distflow train` trains all of "
            "them"
        )

    reading = _check_config(follow_machines(loaded), say)
    trainer = reading.config.trainer

    # First, since rows from Python code are stored in the folder, which another run may be using.
    with claimed(trainer.run_dir), lasting(say, "reading models and data"):
        reading = replace(reading, loaded=with_models_of_runs(reading.loaded, say))
        if trainer.resume_mode == "never":
            forget_rows(trainer.run_dir)
        reading, data = _check_files(reading, say, trains)
        with writing_to(trainer.run_dir):
            spec = _spec(reading, data)
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
    reading, _ = _check_files(_check_config(loaded, quiet), quiet)
    return reading.loaded


def _check_config(loaded: Loaded, say: Say) -> Reading:
    """What the config alone shows, and the user's code that it names."""
    named = named_code(loaded.config)
    for code in named:
        say(f"your code: {code}")

    loaded = follow_pipeline(loaded)
    config = loaded.config
    for code in named_code(config):
        if code not in named:  # which a node names
            say(f"your code: {code}")

    reading = read_config(loaded)
    for note in try_algorithms(config, reading.pipeline):
        say(f"note: {note}")

    with blaming("actor_rollout_ref.actor.optim.optimizer"):
        check_optimizer(config.actor_rollout_ref.actor.optim.optimizer)
    with blaming("critic.optim.optimizer"):
        check_optimizer(config.critic.optim.optimizer)

    return reading


def _check_files(reading: Reading, say: Say, trains: bool = True) -> tuple[Reading, Data]:
    """What the files of data and model show."""
    reading, data = fitted_to_files(reading)
    for line in startup_lines(reading, data, trains):
        say(line)
    return reading, data


def _spec(reading: Reading, data: Data) -> Spec:
    config = reading.config
    pipeline = reading.pipeline
    train: Sequence[PromptRow] = data.train
    if not isinstance(data.train, LazyRows):
        train = EncodedRows(write_encoded(data.train, config.trainer.run_dir, "train"))
    settings = settle_run(config, pipeline, num_rows_of(config, data.train))
    if config.data.sampler is not None:
        try_sampler(config.data.sampler, len(train), config.data.train_batch_size)
    overlap = "" if config.data.allow_overlap else data.overlap()
    is_exact = compute_dtype(config) is torch.float32
    ratio_limit = math.inf
    if is_anchored(config):
        ratio_limit = 1e-4 if is_exact else 0.05
    shares = shares_weights(config)
    has_losses = any(map(takes_policy_loss, pipeline.training_nodes))

    return Spec(
        config=config,
        run_dir=config.trainer.run_dir,
        pipeline=partial(rebuild, config),
        factories=settings.factories,
        plan=settings.plan,
        data=settings.data,
        rows=train,
        validation=tuple(_validation_sets(config, data)),
        sampling=sampling_params(config),
        weight_dtype=engine_dtype(config),
        # an adapter on shared storage is applied unmerged
        sends_weights=not (shares and config.actor_rollout_ref.model.lora_rank > 0),
        shares_weights=shares,
        tolerance=Tolerance.of(is_exact),
        ratio_limit=ratio_limit,
        loss_terms=loss_terms(config) if has_losses else (),
        facts=facts(config, data),
        description=description(reading.loaded, data),
        needs=settings.needs,
        offloads=settings.offloads,
        predicted=settings.predicted,
        sampling_of={name: sampling_params(config, name) for name in config.data.domains},
        warnings=(overlap,) if overlap else (),
    )


def _validation_sets(config: Config, data: Data) -> Iterator[ValidationSet]:
    """One, or one for each domain with validation data, under its name."""
    for domain, prompts in data.validation.items():
        name = f"val-{domain}" if domain else "val"
        rows = EncodedRows(write_encoded(prompts, config.trainer.run_dir, name))
        params = validation_params(config, sampling_params(config, domain))
        yield ValidationSet(domain or "val", rows, *params)
