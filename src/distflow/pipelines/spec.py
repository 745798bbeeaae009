"""From a config to the spec of a run. Whatever can be wrong with a run is found here, the cheap things first."""

from collections.abc import Callable
from functools import partial

from distflow.config import Loaded
from distflow.data.encoded import EncodedRows, write_encoded
from distflow.data.sources import forget_rows
from distflow.graph import Program
from distflow.observe.claim import claimed
from distflow.pipelines.binding import rebuild
from distflow.pipelines.data_plan import num_rows_of
from distflow.pipelines.facts import description, facts
from distflow.pipelines.reading import Data, fitted_to_files, follow_program, read_config
from distflow.pipelines.run_models import with_models_of_runs
from distflow.pipelines.run_options import run_options
from distflow.pipelines.sampling import sampling_params, validation_sets
from distflow.pipelines.settings import spec_settings
from distflow.pipelines.told import told
from distflow.pipelines.travel import check_pickles
from distflow.planning.agreement import follow_allocation
from distflow.planning.plan import check_plan
from distflow.runtime.disk import writing_to
from distflow.runtime.spec import Spec

Say = Callable[[str], None]


def make_spec(loaded: Loaded, say: Say) -> Spec:
    """say: told one line at a time what is being loaded. Raises UserError or PipelineError."""
    loaded = follow_program(follow_allocation(loaded))
    reading = read_config(loaded)
    with claimed(loaded.config.trainer.run_dir):  # first: rows from Python code are kept there; it may be somebody's
        loaded = with_models_of_runs(loaded, say)
        if loaded.config.trainer.resume_mode == "never":
            forget_rows(loaded.config.trainer.run_dir)
        loaded, reading, data = fitted_to_files(loaded, reading)
        for line in told(loaded, reading, data):
            say(line)
        with writing_to(loaded.config.trainer.run_dir):
            spec = _spec(loaded, reading.program, data)
    check_plan(spec.plan, reading.program)
    check_pickles(spec)
    return spec


def _spec(loaded: Loaded, program: Program, data: Data) -> Spec:
    config, run_dir = loaded.config, loaded.config.trainer.run_dir
    sampling, settings = sampling_params(config), spec_settings(config, program, num_rows_of(config, data.train))
    return Spec(
        config=config,
        text=loaded.text,
        options=run_options(config, program, settings["plan"]),
        program=partial(rebuild, config),
        rows=EncodedRows(write_encoded(data.train, run_dir, "train")),
        validation=validation_sets(config, data.held_out),
        sampling=sampling,
        sampling_of={name: sampling_params(config, name) for name in config.data.domains},
        facts=facts(config, data),
        description=description(loaded, data),
        **settings,
    )
