"""The sources of a run's rows: of training, of validation, and of prompts that a user submits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import JUDGE, REWARDS, is_own
from distflow.config import Config
from distflow.config.derived_settings import (
    chooses_by_tags,
    domain_of_tag,
    is_rl,
    own_setting,
    reads_labels,
    reads_pairs,
    reward_functions,
    trains_scores,
)
from distflow.config.keys.data import DataConfig, DomainConfig
from distflow.config.keys.reward import RewardPart, scoring_models
from distflow.data.dataset_columns import (
    BadRows,
    Columns,
    FileRow,
    RawRow,
    listed,
    plain,
    read_rows,
)
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import PromptOptions, PromptRow, PromptSet, UnusableRow
from distflow.data.sources import load_rows
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.models.loading import end_token_ids, has_image_processor
from distflow.models.model_paths import resolve_path
from distflow.rewards.router import check_domains
from distflow.rewards.startup_checks import find_broken

NUM_LOOKED_AT = 256
Rows = tuple[list[RawRow], BadRows]


@dataclass(frozen=True)
class DataSource:
    """A source of rows, and how they become prompts."""

    key: str
    """Of the config, which names the files."""
    files: tuple[str, ...]
    max_samples: int
    """Rows; all if it is below 0."""
    columns: Columns
    bad_rows: str
    options: PromptOptions
    domain: str = ""
    """Empty if rows name their own."""
    rewards: Mapping[str, tuple[RewardPart, ...]] | None = None
    """By domain; rows that these cannot score are left out, or are an error, according to
    `broken_tests`. None keeps them."""
    broken_tests: str = "skip"

    def read(self, run_dir: Path) -> Rows:
        """The rows. Raises UserError for unreadable data, or if most rows are broken."""
        rows, bad = load_rows(
            self.files,
            self.columns,
            key=self.key,
            bad_rows=self.bad_rows,
            max_samples=self.max_samples,
            run_folder=run_dir,
        )
        return self._without_broken_tests(rows, bad), bad

    def _without_broken_tests(
        self, rows: list[RawRow], bad: BadRows, are_all: bool = True
    ) -> list[RawRow]:
        """are_all: the rows are all of the source, of which most must be good."""
        good = list[RawRow]()
        rewards = self.rewards or {}

        for row in rows:
            parts = rewards.get(row.domain) or rewards.get("default", ())
            if why := find_broken([part.name for part in parts], row.answer, row.extra_info):
                bad.broken.append(f"{row.origin}: {why}")
            else:
                good.append(row)

        if not bad.broken:
            return good

        if self.broken_tests == "error":
            advice = "repair them, or exclude such rows with data.broken_tests=skip"
        elif are_all and 2 * len(bad.broken) > len(rows):
            advice = "most rows are affected: check data.answer_key and reward.functions"
        else:
            return good

        said = listed(bad.broken, "row", "whose tests are broken")
        raise UserError(f"{self.key}: {said}\n{advice}")

    def encode(self, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
        """Rows as token ids. Raises UserError for rows that cannot be encoded."""
        raw, bad = rows
        return encode_rows(raw, tokenizer, self.options, bad, end_token_ids(tokenizer))

    def first(self) -> "DataSource":
        """The source with only a few rows, which are checked before a run with `data.lazy`."""
        has_fewer = 0 <= self.max_samples < NUM_LOOKED_AT
        return replace(self, max_samples=self.max_samples if has_fewer else NUM_LOOKED_AT)

    def prompts(
        self, file_rows: Sequence[FileRow], tokenizer: PreTrainedTokenizerBase
    ) -> PromptSet:
        """The usable ones among some rows. Raises UnusableRow if there are none, or UserError like
        `read` and `encode`."""
        bad = BadRows(self.bad_rows)
        rows = list(read_rows(file_rows, self.columns, bad, None))
        bad.check()
        if self.rewards is not None:
            check_domains(self.rewards, [row.domain for row in rows])
        good = self._without_broken_tests(rows, bad, are_all=False)
        if not good:
            raise UnusableRow("broken_tests" if rows else "bad_row", (bad.broken or bad.reasons)[0])

        return self.encode((good, bad), tokenizer)


Read = list[tuple[DataSource, Rows]]


def read_sources(sources: Sequence[DataSource], run_dir: Path) -> Read:
    """The rows of each source; validation sources without rows are left out. Raises as
    `DataSource.read` does, and if no row has a domain's tag."""
    found = Read()
    for source in sources:
        rows, bad = source.read(run_dir)
        if rows:
            found.append((source, (rows, bad)))
        elif source.key.endswith("train_files"):
            tags = source.columns.domain_of_tag.items()
            own = [tag for tag, domain in tags if domain == source.domain]
            raise UserError(
                f"data.domains.{source.domain}.tags: no row of {source.key} has the tag "
                f"{' or '.join(own)} (data.tag_key), so the domain has no training data"
            )

    if sources and not found:
        raise UserError(f"{sources[0].key}: no rows in {', '.join(sources[0].files)}")
    return found


def check_labels(config: Config, read: Read) -> None:
    """Raises UserError if all responses have the same label, so that nothing is compared."""
    data = config.data
    labels = set[object]()
    for _, (rows, _) in read:
        for row in rows:
            is_pair = data.chosen_key in row.extra_info
            labels.add(None if is_pair else row.extra_info[data.label_key])

    if labels in ({True}, {False}):
        kind = "desirable" if True in labels else "undesirable"
        raise UserError(
            f"{read[0][0].key}: all responses are {kind} (column '{data.label_key}'), and KTO "
            "compares both kinds: check data.label_key, or train on good responses with distflow "
            "train sft"
        )


def train_sources(config: Config, scored: bool) -> list[DataSource]:
    """One source, or one per domain in use. scored: whether there are reward functions, which need
    rows' answers."""
    domains = config.data.domains
    if domains:
        names = [name for name, domain in domains.items() if domain.weight]
    else:
        names = [""]

    found = [_source(config, "train", name, scored) for name in names]
    if not scored:
        return found

    rewards = reward_functions(config)
    broken_tests = config.data.broken_tests
    return [replace(each, rewards=rewards, broken_tests=broken_tests) for each in found]


def validation_sources(config: Config, scored: bool) -> list[DataSource]:
    """One source for each key that names files."""
    names = []
    for name, domain in config.data.domains.items():
        if domain.val_files or chooses_by_tags(config, name, "val_files"):
            names.append(name)

    if not names and config.data.val_files:
        names = [""]
    return [_source(config, "val", name, scored) for name in names]


def _source(
    config: Config, split: Literal["train", "val"], domain: str, scored: bool
) -> DataSource:
    """domain: "" for the files of `data` itself."""
    data = config.data
    parts: list[RewardPart] = []
    if scored:
        functions = reward_functions(config)
        for named in [functions.get(domain, ())] if domain else functions.values():
            parts += named

    columns = _columns(config, domain, parts)
    key = "data"
    own: DataConfig | DomainConfig = data
    if domain:
        key = f"data.domains.{domain}"
        own = data.domains[domain]
        columns = replace(columns, group=key, only_domain=domain, domain=None)

    files_key = f"{key}.{split}_files"
    files = getattr(own, f"{split}_files")

    by_tags = chooses_by_tags(config, domain, f"{split}_files")
    if by_tags:
        files_key = f"data.{split}_files"
        files = getattr(data, f"{split}_files")
        columns = replace(columns, domain_of_tag=domain_of_tag(config))

    if by_tags or split == "val":
        columns = replace(columns, tag=data.tag_key)
    most = getattr(own, f"{split}_max_samples")
    options = _options(config, domain, parts, scored)

    return DataSource(files_key, files, most, columns, data.bad_rows, options, domain)


def _columns(config: Config, domain: str, parts: Sequence[RewardPart]) -> Columns:
    """Where the values of rows are. parts: of the rewards of the domain, or of all."""
    data = config.data
    setting = partial(own_setting, config, domain, data)
    is_labelled = reads_labels(config)
    has_responses = reads_pairs(config) or is_labelled
    is_sft = not (is_rl(config) or has_responses)
    builtin = [REWARDS[part.name] for part in parts if part.name in REWARDS]

    return Columns(
        prompt=setting("prompt_key"),
        answer=setting("answer_key"),
        domain=data.domain_key,
        response=setting("response_key") if is_sft else None,
        answer_required=any(reward.needs_answer for reward in builtin),
        messages=setting("messages_key") if is_sft else None,
        tools=setting("tools_key"),
        pair=(data.chosen_key, data.rejected_key) if has_responses else None,
        labelled=(data.completion_key, data.label_key) if is_labelled else None,
        is_chat=setting("prompt_format") == "chat",
        images=data.image_key,
        store=config.trainer.run_dir / "data" / "images",
    )


def _options(
    config: Config, domain: str, parts: Sequence[RewardPart], scored: bool
) -> PromptOptions:
    """How rows become prompts. parts: as for `_columns`."""
    data = config.data
    setting = partial(own_setting, config, domain, data)
    is_rm = trains_scores(config)
    has_responses = reads_pairs(config) or reads_labels(config)

    keeps_messages = is_rm or (scored and bool(scoring_models(config.reward_model)))
    keeps_chats = config.actor_rollout_ref.rollout.workflow is not None
    for part in parts:
        keeps_messages |= part.name in REWARDS and REWARDS[part.name].reads_messages
        # A user's function may be written for TRL or verifiers, whose completions are messages if
        # the prompt is a chat. It and a judge get the chat's text without the template.
        keeps_chats |= is_own(part.name) or part.name == JUDGE

    return PromptOptions(
        max_prompt_length=data.max_prompt_length,
        max_response_length=setting("max_response_length"),
        prompt_format=setting("prompt_format"),
        prompt_template=setting("prompt_template"),
        system_prompt=setting("system_prompt"),
        enable_thinking=setting("enable_thinking"),
        template_kwargs=data.apply_chat_template_kwargs,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        keep_messages=keeps_messages,
        keep_chats=keeps_chats,
        num_workers=data.num_loader_workers,
        pair=(data.chosen_key, data.rejected_key) if has_responses else None,
        labelled=(data.completion_key, data.label_key) if reads_labels(config) else None,
        scores_pairs=is_rm,
    )


def as_read_by_model(sources: Sequence[DataSource], config: Config) -> list[DataSource]:
    """The sources without the column of images if the policy, whose tokenizer encodes the prompts,
    reads text alone. Raises UserError if the config names that column."""
    model = config.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    if path is not None and has_image_processor(resolve_path(path), model.revision):
        if config.data.image_key is not None and find_spec("PIL") is None:
            raise UserError("data.image_key: images need the extra: pip install 'distflow[images]'")
        return list(sources)
    if config.data.image_key not in (None, DataConfig.image_key):
        raise UserError(
            f"data.image_key={config.data.image_key}: the model '{path}' reads text alone: remove "
            "the key, or take a model whose folder has a processor of images"
        )

    return [replace(source, columns=replace(source.columns, images=None)) for source in sources]


def encode_row(
    values: object,
    number: int,
    config: Config,
    pipeline: BoundPipeline,
    tokenizer: PreTrainedTokenizerBase,
) -> PromptRow:
    """A row from Python as a prompt, with the columns of the data set. number: for messages, from
    1.

    Raises UserError for an unusable row, or one of a domain without a reward function.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            "submit takes a dict such as {'prompt': ..., 'answer': ...}, not a "
            f"{type(values).__name__}"
        )

    scored = "reward_fn" in pipeline.services
    (source,) = as_read_by_model(train_sources(config, scored), config)
    columns = {str(key): plain(value) for key, value in values.items()}
    submitted = (f"submitted prompt {number}", columns)
    bad = BadRows("error")
    rows = list(read_rows([submitted], source.columns, bad, "the submitted rows"))
    bad.check()
    options = replace(source.options, num_workers=0, filter_overlong=False)
    (row,) = encode_rows(rows, tokenizer, options, bad, end_token_ids(tokenizer))
    if scored:
        check_domains(reward_functions(config), [row.domain])
    return row
