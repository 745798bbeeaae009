"""Reads a config and its files, and fits the config to them."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from transformers import PreTrainedTokenizerBase

from distflow.config import Config, Loaded, RunLimits, fit_to, with_changes
from distflow.config.compose.load_config import with_named
from distflow.config.derived_settings import CUSTOM, is_sharded, pipeline_name, reads_labels
from distflow.data.encoded_prompts import PromptSet
from distflow.data.rows_on_demand import check_by_row, reads_by_row
from distflow.errors import MissingColumn, UserError
from distflow.graph import BoundPipeline
from distflow.launch.check_extensions import check_extensions, explain_missing_column
from distflow.launch.configured_models import load_policy_tokenizer, policy_limits
from distflow.launch.data_sources import (
    DataSource,
    as_read_by_model,
    check_labels,
    read_sources,
    train_sources,
    validation_sources,
)
from distflow.launch.devices import follow_device
from distflow.launch.importable_code import check_importable
from distflow.launch.lazy_rows import LazyRows
from distflow.launch.run_settings import settle_run
from distflow.launch.select_pipeline import (
    bind,
    generates,
    import_user_modules,
    keys_of_nodes,
    without_reference,
)
from distflow.launch.taken_keys import TakenKeys, refuse_inert_keys
from distflow.launch.threads import make_process_ready
from distflow.planning.allocation_expression import follow_allocation


@dataclass(frozen=True)
class Reading:
    """A config, and what is known from it alone."""

    loaded: Loaded
    pipeline: BoundPipeline
    unused: list[str]
    """Keys of a preset that the pipeline does not read, for messages."""
    train: list[DataSource]
    validation: list[DataSource]

    @property
    def config(self) -> Config:
        return self.loaded.config


@dataclass(frozen=True)
class Data:
    """The files' prompts as tokens."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet | LazyRows
    validation: dict[str, PromptSet]
    """By the domain of the files, "" if none."""
    broken: list[str]
    """Training rows that were left out because no response to them could be scored, with the
    reason."""

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer renders chats."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def looked_at(self) -> PromptSet:
        """The training rows that are known before the start."""
        if isinstance(self.train, LazyRows):
            return self.train.first
        return self.train

    @property
    def how_many(self) -> str:
        """The training rows in words."""
        return f"{len(self.train):,} prompts"

    def overlap(self) -> str:
        """A warning if validation prompts are also trained on; else empty."""
        held_out = list(chain.from_iterable(self.validation.values()))
        if not held_out:
            return ""

        wanted = {row.content for row in held_out}
        trained = {row.content: row.origin for row in self.looked_at if row.content in wanted}
        both = [row for row in held_out if row.content in trained]
        if not both:
            return ""

        first = both[0]
        return (
            f"{len(both):,} of {len(held_out):,} validation prompts are trained on, the first in "
            f"{first.origin} and {trained[first.content]}: accuracy on them does not measure "
            "generalisation (data.allow_overlap=true if intended)"
        )


def read_config(loaded: Loaded) -> Reading:
    """Bind the pipeline and find the sources of rows. Raises UserError for keys that are set and
    that nothing in the run takes.

    The rest of a spec is made here a first time, to find what is wrong with it before any file is
    opened.
    """
    loaded = follow_allocation(loaded)
    config = loaded.config
    make_process_ready(config)
    pipeline = _bind(config)
    scored = "reward_fn" in pipeline.services
    train = train_sources(config, scored)
    validation = validation_sources(config, scored)
    settings = settle_run(config, pipeline, {source.domain: 1 for source in train})
    taken = TakenKeys(config, pipeline, settings.plan, settings.data)
    unused = refuse_inert_keys(loaded, taken, pipeline)
    check_importable(config)

    if config.data.lazy:
        for source in train:
            for file in source.files:
                check_by_row(file, source.key)

    return Reading(loaded, pipeline, unused, train, validation)


def follow_pipeline(loaded: Loaded) -> Loaded:
    """Follow the allocation, check the parts that the config chooses by name, and set `model.dtype`
    for the device; for a custom pipeline also the keys that its nodes name, and `dag.generates` to
    false if it generates nothing. Raises UserError for a part that cannot work, ConfigError if
    other keys contradict the pipeline."""
    loaded = follow_device(follow_allocation(loaded))
    config = loaded.config
    make_process_ready(config)  # before user modules can start threads
    import_user_modules(config)
    check_extensions(config)
    if pipeline_name(config) != CUSTOM:
        return loaded

    named = list(keys_of_nodes(config))
    loaded = with_named(loaded, named)
    keys = {key for key, *_ in named}
    check_extensions(loaded.config)

    by_row = "data.train_files" in keys and all(map(reads_by_row, loaded.config.data.train_files))
    if by_row and "data.lazy" not in keys and loaded.origin("data.lazy") == "default":
        loaded = with_changes(
            loaded, [("data.lazy", True, "a DATA_LOAD node reads the rows of each worker's groups")]
        )

    loaded = with_changes(loaded, without_reference(loaded))
    if loaded.config.dag.generates is not None or generates(_bind(loaded.config)):
        return loaded

    return with_changes(
        loaded, [("dag.generates", False, "no node of the pipeline samples or scores responses")]
    )


def _bind(config: Config) -> BoundPipeline:
    import_user_modules(config)
    try:
        return bind(config)
    except MissingColumn as error:
        raise explain_missing_column(error, config) or error from error


def fitted_to_files(reading: Reading) -> tuple[Reading, Data]:
    """The config and the pipeline within what model and files allow, and the rows. Raises UserError
    for files and rows that cannot be used."""
    limits = policy_limits(reading.config)
    reading = _fitted(reading, limits)
    config = reading.config
    run_dir = config.trainer.run_dir
    to_train = as_read_by_model(reading.train, config)
    to_validate = as_read_by_model(reading.validation, config)

    # All files are read before anything is loaded. Validation comes first: `eval` has nothing else.
    validation_rows = read_sources(to_validate, run_dir)

    wanted = to_train
    if config.data.lazy:
        wanted = [source.first() for source in to_train]

    train_rows = read_sources(wanted, run_dir)
    tokenizer = load_policy_tokenizer(config)
    validation = {source.domain: source.encode(rows, tokenizer) for source, rows in validation_rows}
    read = PromptSet.joined([source.encode(rows, tokenizer) for source, rows in train_rows])
    broken = list[str]()
    for _, (_, bad) in train_rows:
        broken += bad.broken
    train: PromptSet | LazyRows = read
    if config.data.lazy:
        load = partial(load_policy_tokenizer, config)
        train = LazyRows(to_train, read, run_dir / "data", load)
    elif reads_labels(config):
        check_labels(config, train_rows)
    if any(prompts.has_images for prompts in (read, *validation.values())):
        _check_images(config, reading.pipeline)
    reading = _fitted(reading, replace(limits, rows=len(train)))

    return reading, Data(tokenizer, train, validation, broken)


def _check_images(config: Config, pipeline: BoundPipeline) -> None:
    """Raises UserError, with the key, for a part of the run that would not see the images of
    prompts."""
    rollout = config.actor_rollout_ref.rollout
    strategy = config.actor_rollout_ref.actor.strategy

    wrong = ""
    if "rollout" in pipeline.engines and rollout.name != "hf":
        wrong = f"actor_rollout_ref.rollout.name={rollout.name}: set it to hf"
    elif rollout.workflow is not None:
        workflow = f"actor_rollout_ref.rollout.workflow={rollout.workflow}"
        wrong = f"{workflow}: remove it (episodes have no images)"
    elif is_sharded(config):
        wrong = f"actor_rollout_ref.actor.strategy={strategy}: train the model whole on each rank"
    elif "critic" in pipeline.engines or config.dag.policies:
        wrong = (
            f"dag.pipeline={config.dag.pipeline}: take one without a critic, and with one policy"
        )

    if wrong:
        raise UserError(
            f"{wrong}, since it does not read the images of rows (data.image_key="
            f"{config.data.image_key}), or train on text alone (data.image_key=null)"
        )


def _fitted(reading: Reading, limits: RunLimits) -> Reading:
    """The config within these limits, reread if it changed. Raises ConfigError if something does
    not fit."""
    fitted = fit_to(reading.loaded, limits)
    return reading if fitted is reading.loaded else read_config(fitted)
