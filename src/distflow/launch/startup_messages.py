"""The messages of a run before it starts: its data and settings, and notes on probable mistakes."""

from collections.abc import Collection, Iterator
from itertools import chain

from distflow.algorithms.registry import describe_estimator, is_decoupled
from distflow.builtin_names import PROMPT_CHAT
from distflow.config import Config, Loaded, load_config
from distflow.config.compose.setting_origins import is_given
from distflow.config.derived_settings import algorithms, is_online, is_rl, reward_functions
from distflow.config.keys.trainer import StopCondition
from distflow.config.rules.optimizers import optims
from distflow.data.dataset_columns import likely_column, listed
from distflow.data.encoded_prompts import PromptRow, PromptSet
from distflow.errors import UserError, count_of, hint
from distflow.graph import NodeRole
from distflow.launch.configured_models import load_policy_tokenizer
from distflow.launch.lazy_rows import num_rows_of
from distflow.launch.read_config import Data, Reading
from distflow.models.loading import end_token_ids
from distflow.pipelines.nodes.settings_by_domain import options_of
from distflow.pipelines.nodes.workflow_dry_run import describe_turns
from distflow.rewards.router import check_domains
from distflow.runtime.validation_results import validation_names

_NUM_ROWS_CHECKED = 100
_ACCURACY = "val_correct/"
_TOOLS = "actor_rollout_ref.rollout.workflow_kwargs.tools"


def startup_lines(reading: Reading, data: Data, trains: bool = True) -> Iterator[str]:
    """The data and settings of the run. trains: false for `distflow eval`. Raises UserError for a
    domain without a reward function, and for settings that the data contradict."""
    config = reading.config
    if trains:
        if data.train is not data.looked_at:
            yield f"train data: {data.how_many}, each read when its group starts; checked so far:"
        yield from _lines_on_rows("train", data.looked_at, reading)
    for name, found in data.validation.items():
        yield from _lines_on_rows(f"validation {name}".rstrip(), found, reading)
    _check_accuracies(config, data)
    yield from _lines_on_template(config, data)
    if data.broken:
        yield f"left out: {listed(data.broken, 'training row', 'whose tests are broken')}"
    for fitted in reading.loaded.fitted:
        yield f"made to fit: {fitted}"
    if reading.unused:
        yield f"not used by the pipeline '{reading.pipeline.graph_id}': {', '.join(reading.unused)}"
    for key, optim in optims(config):
        if trains and not optim.lr:
            yield f"note: {key}.lr=0: its updates change no weight"
    if not is_rl(config):
        return

    yield from _notes(reading, data)
    if trains and not is_online(config):
        yield from _lines_on_advantages(reading)


def _lines_on_rows(name: str, rows: PromptSet, reading: Reading) -> Iterator[str]:
    config = reading.config
    yield f"{name} data: {', '.join(rows.report.lines())}"
    if len(rows.domains) > 1 and config.data.domains:
        numbers = num_rows_of(config, rows).items()
        yield f"by domain: {', '.join(f'{domain} {number:,}' for domain, number in numbers)}"
    if "reward_fn" in reading.pipeline.services:
        check_domains(reward_functions(config), rows.domains)


def _lines_on_template(config: Config, data: Data) -> Iterator[str]:
    """What the chat template does in episodes."""
    workflow = config.actor_rollout_ref.rollout.workflow
    is_chat = any(map(_is_chat, data.looked_at[:1]))
    if workflow == "tools" and not is_chat:
        raise UserError(
            "actor_rollout_ref.rollout.workflow=tools: the prompts are plain text, and the chat "
            "template tells the model its tools: set data.prompt_format=chat"
        )

    if workflow is not None and is_chat:
        turns = describe_turns(config, data.tokenizer, end_token_ids(data.tokenizer))
        yield f"chat template: {'; '.join(turns)}"


def _lines_on_advantages(reading: Reading) -> Iterator[str]:
    nodes = [node for node in reading.pipeline.nodes if node.node_role is NodeRole.ADVANTAGE]
    for domain, algorithm in algorithms(reading.config):
        options = options_of(nodes[0], domain) if nodes else {}
        of_domain = f" of '{domain}'" if domain else ""
        yield f"advantages{of_domain}: {describe_estimator(algorithm.adv_estimator, options)}"


def _check_accuracies(config: Config, data: Data) -> None:
    """Raises UserError for a key that names an accuracy which validation does not have."""
    rows = chain.from_iterable(data.validation.values())
    names = validation_names([(row.domain, row.tag) for row in rows])
    trainer = config.trainer
    if trainer.stop_when is not None:
        _check_accuracy("stop_when", StopCondition.of(trainer.stop_when).metric, names)
    if trainer.keep_best:
        _check_accuracy("keep_best_metric", trainer.keep_best_metric, names)


def _check_accuracy(key: str, metric: str, names: Collection[str]) -> None:
    """Raises UserError for an accuracy that no validation of these names has."""
    name = metric.removeprefix(_ACCURACY).rpartition("/")[0]
    if names and metric.startswith(_ACCURACY) and name not in names:
        raise UserError(f"trainer.{key}={metric}: validation has no '{name}'{hint(name, names)}")


def template_lines(model: str) -> Iterator[str]:
    """Lines on what a model's chat template does in episodes, without and with thinking and tools.
    Raises UserError for a model without a tokenizer."""
    settings = [f"actor_rollout_ref.model.path={model}"]
    thinks = "data.enable_thinking"
    tokenizer = load_policy_tokenizer(load_config("grpo", settings, complete=False).config)
    ends = end_token_ids(tokenizer)
    yield f"end of a turn: {', '.join(repr(tokenizer.decode([end])) for end in ends)}"
    said = set[str]()
    asked = {
        "turns": [],
        "tools": ["actor_rollout_ref.rollout.workflow=tools", f"{_TOOLS}=[calculator]"],
    }
    if "enable_thinking" in str(tokenizer.chat_template):
        asked |= {f"with {thinks}=true": [f"{thinks}=true"]}

    for name, keys in asked.items():
        config = load_config("grpo", [*settings, *keys], complete=False).config
        try:
            found = describe_turns(config, tokenizer, ends)
        except UserError as error:
            found = [f"cannot be used: {error}"]

        yield from (f"{name}: {line}" for line in found if line not in said)
        said.update(found)


def _is_chat(row: PromptRow) -> bool:
    return PROMPT_CHAT in (row.extra_info or {})


def _notes(reading: Reading, data: Data) -> Iterator[str]:
    """Notes on settings and rows that are valid but probably mistakes."""
    loaded = reading.loaded
    config = reading.config
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    corrects = (
        algorithm.rollout_correction.rollout_is
        or algorithm.recompute_old_log_probs == "false"
        or is_decoupled(actor.policy_loss)
    )

    staleness = config.async_.max_staleness
    if staleness and not corrects:  # the loss ignores the sampling policy
        yield (
            f"note: responses are up to {count_of(staleness, 'step')} off-policy, and are trained "
            "on as if the current policy had generated them; "
            "actor_rollout_ref.actor.policy_loss=decoupled corrects for this"
        )

    is_default = loaded.origin("data.prompt_format") == "default"
    if is_default and data.has_template and not data.looked_at.has_messages:
        yield (
            "note: the model has a chat template, but prompts are plain text: an instruction-tuned "
            "model needs data.prompt_format=chat"
        )

    known = set(data.looked_at.domains)
    for found in data.validation.values():
        known |= set(found.domains)

    for key, named in _by_domain(loaded):
        for name in sorted(set(named) - known):
            meant = hint(name, known)
            yield f"note: {key} has settings of '{name}', but no row is in that domain{meant}"

    if "reward_fn" in reading.pipeline.services:
        yield from _notes_on_answers(loaded, data)


def _by_domain(loaded: Loaded) -> Iterator[tuple[str, Collection[str]]]:
    """Keys with settings of domains, and the names of these."""
    config = loaded.config
    yield "reward.domains", config.reward.domains
    yield "algorithm.domains", config.algorithm.domains
    for name, model in config.reward_model.models.items():
        yield f"reward_model.models.{name}", model.domains
    for name, teacher in config.distill.teachers.items():
        yield f"distill.teachers.{name}", teacher.domains
    if is_given(loaded.origin("reward.functions")):
        yield "reward.functions", config.reward.functions.keys() - {"default"}


def _notes_on_answers(loaded: Loaded, data: Data) -> Iterator[str]:
    """Raises UserError if no row has the column of answers that the user named."""
    key = loaded.config.data.answer_key
    rows = data.looked_at
    without = [row.origin for row in rows if row.ground_truth is None]
    if not without:
        return

    if len(without) < len(rows):
        number = f"{len(without):,} of {len(rows):,} rows"
        yield f"note: {number} have no answer (data.answer_key={key}), the first: {without[0]}"
        return

    absent = f"no row has the column '{key}' (data.answer_key)"
    columns = set[str]()
    for row in rows[:_NUM_ROWS_CHECKED]:
        columns |= {*(row.extra_info or ())}
    columns.discard(PROMPT_CHAT)

    if is_given(loaded.origin("data.answer_key")):
        raise UserError(f"{absent}{hint(key, columns)}")

    note = f"note: {absent}: the reward is called with ground_truth=None"
    if likely := likely_column("data.answer_key", key, columns):
        note += f"; did you mean data.answer_key={likely}?"
    yield note
