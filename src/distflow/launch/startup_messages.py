"""The messages of a run before it starts: its data and settings, and notes on probable mistakes."""

from collections import Counter
from collections.abc import Collection, Iterator

from distflow.algorithms.registry import describe_estimator
from distflow.builtin_names import PROMPT_CHAT
from distflow.config import Loaded, load_config
from distflow.config.derived_settings import algorithms, domain_of_tag, is_rl, reward_functions
from distflow.config.extension_registries import find_unregistered
from distflow.config.keys.trainer import StopCondition
from distflow.data.dataset_columns import TEMPLATE_KWARGS_COLUMN, listed
from distflow.data.encoded_prompts import PromptRow
from distflow.errors import UserError, count_of, hint
from distflow.graph import NodeRole
from distflow.launch.configured_models import tokenizer_loader
from distflow.launch.data_sets import num_rows_of
from distflow.launch.devices import choose_device
from distflow.launch.read_config import Data, Reading
from distflow.launch.threads import find_thread_faults, own_cores, threads_of
from distflow.models.loading import end_token_ids
from distflow.pipelines.nodes.settings_by_domain import options_of
from distflow.pipelines.nodes.workflow_dry_run import describe_turns
from distflow.rewards.router import check_domains
from distflow.runtime.step_metrics import validation_names

_MEDIA = ("image", "images", "video", "videos")
"""Columns that data sets for models of images have."""
_NUM_ROWS_CHECKED = 100  # rows
_LEAST_DISTINCT = 0.9
_ACCURACY = "val_correct/"
_LONG_S = 3600
_HIGHEST_LR = 0.02  # the highest in use with any optimizer here
_TOOLS = "actor_rollout_ref.rollout.workflow_kwargs.tools"


def startup_lines(loaded: Loaded, reading: Reading, data: Data) -> Iterator[str]:
    """The data and settings of the run. Raises UserError for a domain without a reward function."""
    config = loaded.config
    # `distflow eval`
    only_validates = not config.data.domains and config.data.train_files == config.data.val_files
    named = {} if only_validates else {"train": data.looked_at}
    if data.train is not data.looked_at:
        yield f"train data: {data.how_many}, each read when its group starts; checked so far:"
    named |= {
        f"validation{' ' if name else ''}{name}": found for name, found in data.validation.items()
    }
    for name, found in named.items():
        yield f"{name} data: {', '.join(found.report.lines())}"
        if len(found.domains) > 1 and config.data.domains:
            yield "by domain: " + ", ".join(
                f"{own} {rows:,}" for own, rows in num_rows_of(config, found).items()
            )
        if "reward_fn" in reading.pipeline.services:
            check_domains(reward_functions(config), found.domains)
    names = validation_names(
        (row.domain, row.tag) for found in data.validation.values() for row in found
    )
    if config.trainer.stop_when is not None:
        _check_accuracy("stop_when", StopCondition.of(config.trainer.stop_when).metric, names)
    if config.trainer.keep_best:
        _check_accuracy("keep_best_metric", config.trainer.keep_best_metric, names)
    workflow = config.actor_rollout_ref.rollout.workflow
    is_chat = any(map(_is_chat, data.looked_at[:1]))
    if workflow in ("tools", "harbor") or (workflow is not None and is_chat):
        yield (
            "chat template: "
            f"{'; '.join(describe_turns(config, data.tokenizer, end_token_ids(data.tokenizer)))}"
        )
        if not is_chat and workflow == "tools":
            raise UserError(
                "actor_rollout_ref.rollout.workflow=tools: the prompts are plain text, and the "
                "chat template tells the "
                "model its tools: set data.prompt_format=chat"
            )
    if data.broken:
        yield f"left out: {listed(data.broken, 'training row', 'whose tests are broken')}"
    yield from (f"made to fit: {fitted}" for fitted in loaded.fitted)
    if reading.unused:
        yield f"not used by the pipeline '{reading.pipeline.graph_id}': {', '.join(reading.unused)}"
    yield from _notes(loaded, reading, data)
    if is_rl(config) and not only_validates:
        node = next(
            (node for node in reading.pipeline.nodes if node.node_role is NodeRole.ADVANTAGE), None
        )
        for domain, algorithm in algorithms(config):
            of = "" if domain is None else f" of '{domain}'"
            options = {} if node is None else options_of(node, domain)
            yield f"advantages{of}: {describe_estimator(algorithm.adv_estimator, options)}"


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
    tokenizer = tokenizer_loader(load_config("grpo", settings, complete=False).config)()
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


def _notes(loaded: Loaded, reading: Reading, data: Data) -> Iterator[str]:
    """Notes on settings that are valid but probably mistakes, and on built-in parts that lack
    features."""
    config = loaded.config
    cores = own_cores()
    yield from (f"note: {lacking}" for lacking in find_unregistered())
    trainer, rollout = threads_of(config)
    if (trainer or 0) + (rollout or 0) > cores:
        beside = f" beside actor_rollout_ref.rollout.num_threads={rollout}" if rollout else ""
        yield (
            f"note: trainer.num_threads={trainer}{beside}, but this process has {cores} cores: "
            "threads will compete"
        )
    if choose_device(config).type == "cpu" and config.actor_rollout_ref.model.dtype == "bfloat16":
        yield (
            "note: most CPUs are much slower in bfloat16; actor_rollout_ref.model.dtype=auto uses "
            "float32 here"
        )
    staleness = config.async_.max_staleness if is_rl(config) else 0
    algorithm = config.algorithm
    loss = config.actor_rollout_ref.actor.policy_loss
    corrects = (
        algorithm.rollout_correction.rollout_is or algorithm.recompute_old_log_probs == "false"
    )
    if staleness and not corrects and loss != "decoupled":  # the loss ignores the sampling policy
        yield (
            f"note: responses are up to {count_of(staleness, 'step')} off-policy, and are trained "
            "on as if the current "
            "policy had generated them; actor_rollout_ref.actor.policy_loss=decoupled corrects for "
            "this"
        )
    is_default = loaded.origin("data.prompt_format") == "default"
    has_template = bool(getattr(data.tokenizer, "chat_template", None))
    if is_default and has_template and is_rl(config) and not data.looked_at.has_messages:
        yield (
            "note: the model has a chat template, but prompts are plain text: an instruction-tuned "
            "model needs "
            "data.prompt_format=chat"
        )
    is_text = config.data.prompt_format == "text" and not data.looked_at.has_messages
    for name in (config.data.tools_key, TEMPLATE_KWARGS_COLUMN) if is_text else ():
        if any(name in (row.extra_info or {}) for row in data.looked_at[:_NUM_ROWS_CHECKED]):
            yield (
                f"note: rows have the column '{name}', which only a chat template uses, but "
                "prompts are plain text: "
                "see data.prompt_format"
            )
    known = {
        domain for found in (data.looked_at, *data.validation.values()) for domain in found.domains
    }
    for key, named in _by_domain(loaded):
        for name in sorted(set(named) - known):
            yield (
                f"note: {key} has settings of '{name}', but no row is in that "
                f"domain{hint(name, known)}"
            )
    tags = {row.tag for found in (data.looked_at, *data.validation.values()) for row in found}
    for tag, domain in domain_of_tag(config).items():
        if tag not in tags:
            yield (
                f"note: data.domains.{domain}.tags has '{tag}', but no used row has that "
                f"tag{hint(tag, tags)}"
            )
    yield from (f"note: {fault}" for fault in find_thread_faults())
    yield from _notes_on_rows(loaded, reading, data)
    actor = config.actor_rollout_ref.actor
    timeout_s = config.reward.timeout_s
    if actor.optim.lr > _HIGHEST_LR:
        yield f"note: actor_rollout_ref.actor.optim.lr={actor.optim.lr:g} is unusually high"
    if is_rl(config) and (actor.clip_ratio_high or 0.0) >= 1:
        above = (
            "clip_ratio_high is counted from 1, so ratios up to "
            f"{1 + (actor.clip_ratio_high or 0.0):g} are allowed"
        )
        yield (
            f"note: actor_rollout_ref.actor.clip_ratio_high={actor.clip_ratio_high:g} is unusually "
            f"high: {above}"
        )
    if is_rl(config) and timeout_s >= _LONG_S:
        yield (
            f"note: reward.timeout_s={timeout_s:g} lets a call of a reward function take "
            f"{timeout_s / 3600:.3g} hours"
        )
    if "\\n" in (config.data.prompt_template or ""):
        yield (
            "note: data.prompt_template has a backslash and an n, not a line break: write "
            "$'...\\n...' in the shell"
        )
    workers = config.trainer.n_gpus_per_node
    if (
        choose_device(config).type == "cpu"
        and workers > cores
        and config.trainer.launcher == "local"
    ):
        yield (
            f"note: {workers} processes share {count_of(cores, 'core')} of this machine "
            "(trainer.n_gpus_per_node)"
        )


def _by_domain(loaded: Loaded) -> Iterator[tuple[str, Collection[str]]]:
    """Keys with settings of domains, and the names of these."""
    config = loaded.config
    yield from (
        ("reward.domains", config.reward.domains),
        ("algorithm.domains", config.algorithm.domains),
    )
    yield from (
        (f"reward_model.models.{name}", model.domains)
        for name, model in config.reward_model.models.items()
    )
    if not loaded.origin("reward.functions").startswith(("default", "presets/")):
        yield "reward.functions", config.reward.functions.keys() - {"default"}


def _oddities(row: PromptRow, unknown: int | None) -> Iterator[str]:
    """What is probably wrong with a row, as the end of a sentence. unknown: the tokenizer's unknown
    token."""
    if isinstance(row.ground_truth, str) and row.ground_truth != row.ground_truth.strip():
        yield "have an answer that begins or ends in white space"
    if unknown is not None and unknown in row.prompt_ids:
        yield "have a prompt with characters that the tokenizer does not know"
    if row.prompt_text.lstrip().startswith('[{"role"'):
        yield (
            "have chat messages as JSON text in the prompt, which is taken as it is: write them as "
            "a list"
        )
    if (
        row.response_ids
        and row.prompt_ids
        and row.response_ids[: len(row.prompt_ids)] == row.prompt_ids
    ):
        yield "have a response that begins with the prompt"
    if any((row.extra_info or {}).get(name) for name in _MEDIA):
        yield "have images or videos, which the model will not see: it reads only text"


def _notes_on_rows(loaded: Loaded, reading: Reading, data: Data) -> Iterator[str]:
    """Raises UserError if no row has the answers whose column was set."""
    key = loaded.config.data.answer_key
    kinds = Counter[str]()
    seen = set[int]()
    rows = data.looked_at
    first = dict[str | frozenset[str], str]()
    odd = Counter[str]()
    names_of = Counter[frozenset[str]]()
    for row in rows:
        kind = type(row.ground_truth).__name__
        kinds[kind] += 1
        names = frozenset(row.extra_info or ())
        names_of[names] += 1
        oddities = [*_oddities(row, data.tokenizer.unk_token_id)]
        odd.update(oddities)
        keys: list[str | frozenset[str]] = [kind, names, *oddities]
        for what in keys:
            first.setdefault(what, row.origin)
        # a game's rows may differ by their seed alone
        told = repr((row.ground_truth, row.extra_info))
        seen.add(hash((*row.content, told, row.rejected_ids)))
    if "reward_fn" in reading.pipeline.services and [*kinds] == ["NoneType"]:
        columns = sorted(
            {name for row in rows[:_NUM_ROWS_CHECKED] for name in row.extra_info or ()}
            - {PROMPT_CHAT}
        )
        absent = f"no row has the column '{key}' (data.answer_key)"
        if not loaded.origin("data.answer_key").startswith(("default", "presets/")):
            raise UserError(f"{absent}{hint(key, columns)}")
        yield f"note: {absent}: the reward is called with ground_truth=None"
    elif "reward_fn" in reading.pipeline.services and len(kinds) > 1:
        counts = ", ".join(f"{kind} {number:,}" for kind, number in kinds.most_common())
        rare = first[kinds.most_common()[-1][0]]
        types = f"several types ({counts}; see {rare})"
        yield (
            f"note: the reward is called with ground truths of {types}, from data.answer_key={key}"
        )
        if "NoneType" in kinds:
            yield (
                f"note: {kinds['NoneType']:,} of {len(rows):,} rows have no answer (the first: "
                f"{first['NoneType']})"
            )
    for name in sorted(frozenset[str]().union(*names_of)):
        without = [names for names in names_of if name not in names]
        if 0 < 10 * (lacking := sum(names_of[names] for names in without)) <= len(rows):
            yield (
                f"note: {lacking:,} of {len(rows):,} rows lack the column '{name}' (the first: "
                f"{first[without[0]]})"
            )
    for oddity, number in odd.items():
        yield f"note: {number:,} of {len(rows):,} rows {oddity} (the first: {first[oddity]})"
    if len(seen) < _LEAST_DISTINCT * len(rows):
        yield (
            f"note: {len(rows) - len(seen):,} of {len(rows):,} rows are duplicates: see `distflow "
            "data check`"
        )
