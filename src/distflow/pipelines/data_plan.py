"""What a run draws from its data, as the config says it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction

from distflow.config import Config
from distflow.config.program import is_rl
from distflow.data.prompts import PromptSet
from distflow.flow.curriculum import CurriculumPlan, load_curriculum
from distflow.flow.data_plan import DataPlan, DomainPlan
from distflow.flow.order import total_steps
from distflow.flow.skips import SkipPlan


def data_plan(config: Config, rows: Mapping[str, int]) -> DataPlan:
    """What the run draws from its data. total_training_steps may cut the epochs short, or go on beyond them. Of domains
    an epoch is as many groups as there are rows in all.

    rows: how many there are by domain, in their order, "" of one source.
    """
    data, trainer = config.data, config.trainer
    steps, epochs, num_rows = trainer.total_training_steps, trainer.total_epochs, sum(rows.values())
    plan = DataPlan(
        num_rows=num_rows,
        consumer_batch=data.train_batch_size,
        group_size=config.actor_rollout_ref.rollout.n if is_rl(config) else 1,
        total_tickets=None if steps or data.domains else epochs * num_rows,
        total_steps=steps or total_steps(epochs, num_rows, data.train_batch_size),
        seed=data.seed if data.shuffle else 0,
        shuffle=data.shuffle,
        max_concurrent=config.async_.max_concurrent_rollouts,
        domains=tuple(
            DomainPlan(name, rows[name], data.domains[name].weight, data.domains[name].n) for name in rows if name
        ),
        curriculum=_curriculum(config),
        skips=_skips(config, rows),
    )
    if not is_rl(config):
        return plan
    filters = config.algorithm.filter_groups
    return replace(
        plan,
        max_staleness=config.async_.max_staleness,
        max_num_gen_batches=filters.max_num_gen_batches,
        when_exhausted="continue" if filters.when_exhausted == "continue" else "error",
        oversampling=Fraction(str(filters.oversampling)),
    )


def _curriculum(config: Config) -> CurriculumPlan | None:
    """Raises UserError where its function is not there."""
    settings = config.data.curriculum
    if settings.function is None:
        return None
    load_curriculum(settings.function)
    return CurriculumPlan(settings.function, settings.every, settings.smoothing)


def _skips(config: Config, domains: Iterable[str]) -> SkipPlan | None:
    if not is_rl(config):
        return None
    data, outside = config.data, dict[str, tuple[float, float]]()
    for name in domains:
        own = data.domains[name].skip_outside if name else None
        if band := own or data.skip_outside:
            outside[name] = band
    return SkipPlan(outside, data.skip_epochs) if outside else None


def num_rows_of(config: Config, prompts: PromptSet) -> dict[str, int]:
    """By domain in the order of the rows, or of the one source, ""."""
    if not config.data.domains:
        return {"": len(prompts)}
    return dict(Counter(row.domain for row in prompts))
