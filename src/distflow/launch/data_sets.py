"""The data of a run: its plan of steps and epochs, the sources of training and validation prompts,
and prompts that a user submits."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import JUDGE, REWARDS, is_own
from distflow.config import Config
from distflow.config.derived_settings import (
    chooses_by_tags,
    domain_of_tag,
    find_pipeline,
    is_rl,
    own_setting,
    reads_pairs,
    reward_functions,
    validates,
)
from distflow.config.keys.data import DataConfig
from distflow.config.keys.reward import RewardPart, scoring_models
from distflow.data.dataset_columns import (
    DEFAULT_DOMAIN,
    BadRows,
    Columns,
    FileRow,
    RawRow,
    listed,
    plain,
    read_rows,
)
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import (
    PromptOptions,
    PromptRow,
    PromptRows,
    PromptSet,
    UnusableRow,
)
from distflow.data.rows_on_demand import IndexedFile, index_file
from distflow.data.sources import load_rows
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.models.loading import end_token_ids, has_image_processor
from distflow.models.model_paths import resolve_path
from distflow.rewards.router import check_domains
from distflow.rewards.startup_checks import find_broken
from distflow.scheduling.data_plan import DataPlan, DomainPlan, Frequency, total_steps
from distflow.scheduling.difficulty_filter import SkipPlan
from distflow.untrusted_files import matching_files


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
    plan = DataPlan(
        num_rows=num_rows,
        consumer_batch=data.train_batch_size,
        group_size=config.actor_rollout_ref.rollout.n if is_rl(config) else 1 + reads_pairs(config),
        total_groups=None if steps or data.domains else epochs * num_rows,
        total_steps=steps or total_steps(epochs, num_rows, data.train_batch_size),
        seed=data.seed if data.shuffle else 0,
        shuffle=data.shuffle,
        max_concurrent=config.async_.max_concurrent_rollouts,
        domains=tuple(
            DomainPlan(name, rows[name], data.domains[name].weight, data.domains[name].n)
            for name in rows
            if name
        ),
        saves=Frequency(trainer.save_freq, trainer.save_freq_epochs, trainer.save_freq_secs),
        validates=_validates(config),
        stop_when=trainer.stop_when,
        loads_rows=not is_rl(config),
    )
    if not is_rl(config):
        return plan
    filters = config.algorithm.filter_groups
    bands = {name: own_setting(config, name, data, "skip_outside") for name in rows}
    outside = {name: band for name, band in bands.items() if band}
    return replace(
        plan,
        max_staleness=min(config.async_.max_staleness, plan.total_steps),  # no sample can be staler
        max_num_gen_batches=filters.max_num_gen_batches,
        when_exhausted="continue" if filters.when_exhausted == "continue" else "error",
        oversampling=_oversampling(config),
        skips=SkipPlan(outside, data.skip_epochs) if outside else None,
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


def num_rows_of(config: Config, prompts: "PromptSet | LazyRows") -> dict[str, int]:
    """The number of rows by domain, in row order; "" for one source."""
    if not config.data.domains:
        return {"": len(prompts)}
    if isinstance(prompts, LazyRows):
        return prompts.num_by_domain
    return dict(Counter(row.domain for row in prompts))


Rows = tuple[list[RawRow], BadRows]


@dataclass(frozen=True)
class DataSource:
    """A source of rows, and how they become prompts. key: of the config, which names the files.
    domain: "" if rows name their own. rewards: by domain; rows that these cannot score are left
    out, or are an error, according to `broken_tests`. None keeps them."""

    key: str
    files: tuple[str, ...]
    max_samples: int
    columns: Columns
    bad_rows: str
    options: PromptOptions
    domain: str = ""
    rewards: Mapping[str, tuple[RewardPart, ...]] | None = None
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
        if bad.broken and (
            self.broken_tests == "error" or (are_all and 2 * len(bad.broken) > len(rows))
        ):
            advice = "repair them, or exclude such rows with data.broken_tests=skip"
            if self.broken_tests != "error":
                advice = "most rows are affected: check data.answer_key and reward.functions"
            raise UserError(
                f"{self.key}: {listed(bad.broken, 'row', 'whose tests are broken')}\n{advice}"
            )
        return good

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


NUM_LOOKED_AT = 256
NUM_HELD = 4096
LoadTokenizer = Callable[[], PreTrainedTokenizerBase]


class LazyRows(PromptRows):
    """The rows of some sources, each read and encoded on demand. first: the first rows of each
    source, read before the run. load_tokenizer: called by each process that reads rows."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        first: PromptSet,
        folder: Path,
        load_tokenizer: LoadTokenizer,
    ) -> None:
        """folder: for the index of the files. Raises UserError for files that cannot be read row by
        row."""
        self.first = first
        self._load_tokenizer = load_tokenizer
        self._files = list[tuple[DataSource, IndexedFile, int]]()
        self.num_by_domain = dict[str, int]()
        self._held = dict[int, PromptRow]()
        for source in sources:
            num_rows = 0
            for path in _files_of(source.files):
                found = index_file(path, folder, source.key)
                if source.max_samples >= 0:
                    found = replace(
                        found, num_rows=min(found.num_rows, source.max_samples - num_rows)
                    )
                self._files.append((source, found, found.num_rows))
                num_rows += found.num_rows
            self.num_by_domain[source.domain] = num_rows
        self._ends = list(accumulate(num_rows for *_, num_rows in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load_tokenizer()

    def fingerprint(self) -> str:
        """A hash of the files' content."""
        files = [(found.fingerprint, num_rows) for _, found, num_rows in self._files]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def prepare(self, indices: Sequence[int]) -> None:
        """Render chat templates for all of them at once. An error is raised when its row is
        read."""
        wanted = sorted(set(indices) - self._held.keys())
        for number, own in groupby(wanted, lambda index: bisect_right(self._ends, index)):
            with suppress(UserError):
                self._held |= self._read(number, list(own))
        for index in list(self._held)[:-NUM_HELD]:
            self._held.pop(index, None)

    def _row(self, index: int) -> PromptRow:
        return self._held.get(index) or self._read(bisect_right(self._ends, index), [index])[index]

    def _read(self, number: int, indices: Sequence[int]) -> dict[int, PromptRow]:
        """The usable ones among these rows of a file."""
        (source, file, _), first = self._files[number], self._ends[number - 1] if number else 0
        file_rows = [file.row(index - first) for index in indices]
        index_of = {origin: index for (origin, _), index in zip(file_rows, indices, strict=True)}
        rows = source.prompts(file_rows, self._tokenizer)
        if len({row.origin for row in rows}) < len(rows):
            raise UserError(
                f"{rows[0].origin}: the chat template needs several rows for it: set "
                "data.lazy=false"
            )
        return {
            index: replace(row, index=index) for row in rows for index in [index_of[row.origin]]
        }


def _files_of(sources: Sequence[str]) -> Iterator[Path]:
    """The files that are meant, of which some are named by patterns."""
    for source in sources:
        for path in matching_files(source) or [Path(source)]:
            yield path.expanduser().absolute()


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
            own = [
                tag
                for tag, domain in source.columns.domain_of_tag.items()
                if domain == source.domain
            ]
            raise UserError(
                f"data.domains.{source.domain}.tags: no row of {source.key} has the tag "
                f"{' or '.join(own)} (column "
                f"'{source.columns.tag}', data.tag_key), so the domain has no training data"
            )
    if sources and not found:
        raise UserError(f"{sources[0].key}: no rows in {', '.join(sources[0].files)}")
    return found


def train_sources(config: Config, scored: bool) -> list[DataSource]:
    """One source, or one per domain in use. scored: whether there are reward functions, which need
    rows' answers."""
    domains = config.data.domains
    names = [name for name, domain in domains.items() if domain.weight] if domains else [""]
    found = [_source(config, "train", name, scored) for name in names]
    if not scored:
        return found
    return [
        replace(each, rewards=reward_functions(config), broken_tests=config.data.broken_tests)
        for each in found
    ]


def validation_sources(config: Config, scored: bool) -> list[DataSource]:
    """One source for each key that names files."""
    domains = config.data.domains
    own = [
        name
        for name in domains
        if domains[name].val_files or chooses_by_tags(config, name, "val_files")
    ]
    return [
        _source(config, "val", name, scored)
        for name in own or ([""] if config.data.val_files else [])
    ]


def _source(
    config: Config, split: Literal["train", "val"], domain: str, scored: bool
) -> DataSource:
    """domain: "" for the files of `data` itself."""
    data = config.data
    functions = reward_functions(config)
    is_rm = reads_pairs(config)
    is_sft = not is_rl(config) and not is_rm
    reads_all = bool(scoring_models(config.reward_model))
    parts = (
        functions.get(domain, ())
        if domain
        else [part for named in functions.values() for part in named]
    )
    rewards = [REWARDS[part.name] for part in parts if part.name in REWARDS]
    # A user's function may be written for TRL or verifiers, whose completions are messages if the
    # prompt is a chat. It and a judge get the chat's text without the template.
    asks_chats = any(is_own(part.name) or part.name == JUDGE for part in parts)
    own = partial(own_setting, config, domain, data)
    files = data.domains[domain] if domain else data
    key = f"data.domains.{domain}" if domain else "data"
    named = getattr(files, f"{split}_files")
    most = getattr(files, f"{split}_max_samples")
    files_key = f"{key}.{split}_files"
    by_tags = chooses_by_tags(config, domain, f"{split}_files")
    if by_tags:
        named = getattr(data, f"{split}_files")
        files_key = f"data.{split}_files"
    columns = Columns(
        prompt=own("prompt_key"),
        answer=own("answer_key"),
        domain=None if domain else data.domain_key,
        response=own("response_key") if is_sft else None,
        answer_required=scored and any(reward.needs_answer for reward in rewards),
        messages=own("messages_key") if is_sft else None,
        tools=own("tools_key"),
        is_chat=own("prompt_format") == "chat",
        only_domain=domain or DEFAULT_DOMAIN,
        group=key,
        tag=data.tag_key if by_tags or split == "val" else None,
        domain_of_tag=domain_of_tag(config) if by_tags else {},
        images=data.image_key,
        store=config.trainer.run_dir / "data" / "images",
    )
    options = PromptOptions(
        max_prompt_length=data.max_prompt_length,
        max_response_length=own("max_response_length"),
        prompt_format=own("prompt_format"),
        prompt_template=own("prompt_template"),
        system_prompt=own("system_prompt"),
        enable_thinking=own("enable_thinking"),
        template_kwargs=data.apply_chat_template_kwargs,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        keep_messages=is_rm
        or (scored and (reads_all or any(reward.reads_messages for reward in rewards))),
        keep_chats=(scored and asks_chats) or config.actor_rollout_ref.rollout.workflow is not None,
        num_workers=data.num_loader_workers,
        pair=(data.chosen_key, data.rejected_key) if is_rm else None,
    )
    return DataSource(files_key, named, most, columns, data.bad_rows, options, domain)


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
            "the key, or take a "
            "model whose folder has a processor of images"
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
            f"submit takes a dict such as {{'prompt': ..., 'answer': ...}}, not a "
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
