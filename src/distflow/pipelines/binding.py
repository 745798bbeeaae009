"""The program of a config, bound to it, here and on a worker."""

import os

import torch

from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.functions import LoadError, load_modules
from distflow.graph import Program
from distflow.pipelines.devices import planes_threads
from distflow.pipelines.heap import keep_freed_memory
from distflow.pipelines.select import bound, select_pipeline
from distflow.planning.threads import own_cores

_MAX_THREADS = 1024


def bind(config: Config) -> Program:
    """The program of a config, bound to it and to the columns that data sets have. Raises PipelineError."""
    return bound(select_pipeline(config), config)


def rebuild(config: Config) -> Program:
    """The same on a worker, which is to be made ready and has the user's modules to import first."""
    make_process_ready(config)
    import_user_modules(config)
    return bind(config)


def make_process_ready(config: Config) -> None:
    """Its heap, and its threads before any of them starts: results are bit-equal for one number of threads only.
    Raises UserError for more than can be meant."""
    keep_freed_memory()
    trainer, rollout = planes_threads(config)
    for key, threads in (("trainer", trainer), ("actor_rollout_ref.rollout", rollout)):
        if (threads or 0) > _MAX_THREADS:
            most = f"set it to at most the cores of this machine, {os.cpu_count()}"
            raise UserError(f"{key}.num_threads={threads}: {most}")
    if trainer is None and "OMP_NUM_THREADS" not in os.environ:  # which is meant
        trainer = min(torch.get_num_threads(), own_cores())  # torch does not look at a container's share of time
    if trainer is not None:
        torch.set_num_threads(trainer)


def import_user_modules(config: Config) -> None:
    """Those of `trainer.imports`, which register estimators, losses, columns."""
    try:
        load_modules(config.trainer.imports)
    except LoadError as err:
        raise UserError(f"trainer.imports: {err}") from err
