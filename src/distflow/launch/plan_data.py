"""How a run uses its data: steps, epochs, domains, and when it validates and saves."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from operator import attrgetter

from distflow.config import Config
from distflow.config.derived_settings import (
    find_pipeline,
    is_rl,
    reads_pairs,
    validates,
)
from distflow.scheduling.data_plan import DataPlan, DomainPlan, Frequency, total_steps


def data_plan(config: Config, rows: Mapping[str, int]) -> DataPlan:
    """How the run uses its data. total_training_steps may end before or after total_epochs. With
    domains, an epoch has as many groups as there are rows in total.

    rows: their number by domain, in order, "" for one source.
    """
    data = config.data
    trainer = config.trainer
    steps = trainer.total_training_steps
    epochs = trainer.total_epochs
    num_rows = sum(rows.values())

    domains = []
    for name, number in rows.items():
        if name:
            own = data.domains[name]
            domains.append(DomainPlan(name, number, own.weight, own.n))

    plan = DataPlan(
        num_rows=num_rows,
        consumer_batch=data.train_batch_size,
        group_size=config.actor_rollout_ref.rollout.n if is_rl(config) else 1 + reads_pairs(config),
        total_groups=None if steps or data.domains else epochs * num_rows,
        total_steps=steps or total_steps(epochs, num_rows, data.train_batch_size),
        seed=data.seed if data.shuffle or data.sampler else 0,
        shuffle=data.shuffle,
        sampler=data.sampler,
        max_concurrent=config.async_.max_concurrent_rollouts,
        domains=tuple(domains),
        saves=Frequency(trainer.save_freq, trainer.save_freq_epochs, trainer.save_freq_secs),
        validates=_validates(config),
        stop_when=trainer.stop_when,
        loads_rows=not is_rl(config),
    )
    if not is_rl(config):
        return plan

    filters = config.algorithm.filter_groups
    return replace(
        plan,
        max_staleness=min(config.async_.max_staleness, plan.total_steps),  # no sample can be staler
        max_num_gen_batches=filters.max_num_gen_batches,
        when_exhausted="continue" if filters.when_exhausted == "continue" else "error",
        oversampling=_oversampling(config),
    )


def _oversampling(config: Config) -> Fraction:
    """Extra groups that run, as a share of those that a step lacks."""
    pipeline = find_pipeline(config)
    if pipeline is not None and pipeline.oversample_factor:
        return Fraction(str(attrgetter(pipeline.oversample_factor)(config))) - 1
    return Fraction(str(config.algorithm.filter_groups.oversampling))


def _validates(config: Config) -> Frequency:
    """When to validate. Off is always accepted; a frequency only makes sense with validation
    data."""
    trainer = config.trainer
    if not validates(config):
        return Frequency(min(trainer.test_freq, 0))
    return Frequency(trainer.test_freq, trainer.test_freq_epochs, trainer.test_freq_secs)
