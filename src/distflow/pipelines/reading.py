"""What a config says, and what the files hold that it names."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from distflow.config import Config, Loaded, Room, fit_to, with_changes
from distflow.config.program import CUSTOM, program_name
from distflow.config.watch import watch
from distflow.data.prompts import PromptSet
from distflow.graph import Program
from distflow.pipelines.binding import bind, import_user_modules, make_process_ready
from distflow.pipelines.data_sets import DataSource, held_out_sources, train_sources
from distflow.pipelines.inert import refuse_inert_keys
from distflow.pipelines.models import load_policy_tokenizer, policy_context
from distflow.pipelines.run_options import run_options
from distflow.pipelines.sampling import sampling_params, validation_params
from distflow.pipelines.select import generates
from distflow.pipelines.settings import spec_settings
from distflow.pipelines.travel import check_importable


@dataclass(frozen=True)
class Reading:
    """What the config alone says. unused: keys of a preset that the program does not take, as they are shown."""

    program: Program
    unused: list[str]
    train: list[DataSource]
    held_out: list[DataSource]


@dataclass(frozen=True)
class Data:
    """What the files hold, as tokens; held out by the domain that has the files, "" where none has. broken: training
    rows that were left out since no answer to them could be judged, and why."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    held_out: dict[str, PromptSet]
    broken: list[str]


def read_config(loaded: Loaded) -> Reading:
    """Bind the program, and read every key that the run uses. Raises UserError for one that was set and is not read.

    The rest of a spec is made twice, here to see what it reads, before any file is opened.
    """
    config, reads = watch(loaded.config)
    make_process_ready(config)
    import_user_modules(config)
    program = bind(config)
    judged = "judge" in program.services
    train, held_out = train_sources(config, judged), held_out_sources(config, judged)
    settings = spec_settings(config, program, num_rows={source.domain: 1 for source in train})
    run_options(config, program, settings["plan"])
    validation_params(config, sampling_params(config))
    for source in train:
        sampling_params(config, source.domain)
    unused = refuse_inert_keys(loaded, reads, program)
    check_importable(loaded.config)
    return Reading(program, unused, train, held_out)


def follow_program(loaded: Loaded) -> Loaded:
    """The config of a program of the user's that generates nothing says so. Raises ConfigError where other keys do not
    go with that."""
    config = loaded.config
    if program_name(config) != CUSTOM or config.dag.generates is not None:
        return loaded
    import_user_modules(config)
    if generates(bind(config)):
        return loaded
    return with_changes(loaded, [("dag.generates", False, "no node of the program samples or judges answers")])


def fit_to_files(loaded: Loaded) -> Loaded:
    """The config that a run would have, made to fit its model and data. Starts none. Raises as `make_spec` does."""
    loaded = follow_program(loaded)
    return fitted_to_files(loaded, read_config(loaded))[0]


def fitted_to_files(loaded: Loaded, reading: Reading) -> tuple[Loaded, Reading, Data]:
    context = policy_context(loaded.config)
    loaded, reading = _fitted(loaded, reading, Room(context=context))
    data = _read_data(loaded.config, reading)
    loaded, reading = _fitted(loaded, reading, Room(len(data.train), context))
    return loaded, reading, data


def _fitted(loaded: Loaded, reading: Reading, room: Room) -> tuple[Loaded, Reading]:
    """The config in that room, read again where it became another. Raises ConfigError where something does not fit."""
    fitted = fit_to(loaded, room)
    return (loaded, reading) if fitted is loaded else (fitted, read_config(fitted))


def _read_data(config: Config, reading: Reading) -> Data:
    """All files are read before anything is loaded. What validates comes first: `eval` trains on nothing else."""
    run_dir = config.trainer.run_dir
    held_out_rows = [source.read(run_dir) for source in reading.held_out]
    rows = [source.read(run_dir) for source in reading.train]
    tokenizer = load_policy_tokenizer(config)
    encoded = [source.encode(own, tokenizer) for source, own in zip(reading.held_out, held_out_rows, strict=True)]
    held_out = {source.domain: prompts for source, prompts in zip(reading.held_out, encoded, strict=True)}
    train = [source.encode(own, tokenizer) for source, own in zip(reading.train, rows, strict=True)]
    return Data(tokenizer, PromptSet.joined(train), held_out, [each for _, bad in rows for each in bad.broken])
