"""From the config's files to prompts, for training and for validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.by_domain import reward_functions
from distflow.config.names import REWARDS
from distflow.config.program import is_rl
from distflow.config.reward import RewardPart
from distflow.data.prompts import PromptOptions, PromptSet, encode_rows
from distflow.data.rows import DEFAULT_DOMAIN, BadRows, Columns, RawRow
from distflow.data.sources import load_rows
from distflow.models.tokenizer import end_token_ids

Rows = tuple[list[RawRow], BadRows]


@dataclass(frozen=True)
class DataSource:
    """Where rows come from and how they become prompts. key: that of the config which names the files. domain: "" of
    rows that say theirs themselves."""

    key: str
    files: tuple[str, ...]
    max_samples: int
    columns: Columns
    bad_rows: str
    options: PromptOptions
    domain: str = ""

    def read(self, run_dir: Path) -> Rows:
        """Raises UserError for data that cannot be read."""
        return load_rows(
            self.files,
            self.columns,
            key=self.key,
            bad_rows=self.bad_rows,
            max_samples=self.max_samples,
            run_folder=run_dir,
        )

    def encode(self, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
        """Rows as token ids. Raises UserError for rows that cannot be encoded."""
        raw, bad = rows
        return encode_rows(raw, tokenizer, self.options, bad, end_token_ids(tokenizer))


def train_sources(config: Config, judged: bool) -> list[DataSource]:
    """One, or one for each domain that is drawn from. judged: the rows' answers go to verifiers."""
    data = config.data
    if not data.domains:
        return [_source(config, "data.train_files", data.train_files, data.train_max_samples, judged)]
    return [
        _source(config, f"data.domains.{name}.train_files", domain.train_files, domain.train_max_samples, judged, name)
        for name, domain in data.domains.items()
        if domain.weight
    ]


def held_out_sources(config: Config, judged: bool) -> list[DataSource]:
    """As many as name files."""
    data = config.data
    if data.val_files:
        return [_source(config, "data.val_files", data.val_files, data.val_max_samples, judged)]
    return [
        _source(config, f"data.domains.{name}.val_files", domain.val_files, domain.val_max_samples, judged, name)
        for name, domain in data.domains.items()
        if domain.val_files
    ]


def _source(
    config: Config, key: str, files: tuple[str, ...], max_samples: int, judged: bool, domain: str = ""
) -> DataSource:
    data, learns_answers = config.data, not is_rl(config)
    settings = data.domains.get(domain) if domain else None

    def own(name: str) -> Any:
        """What the domain says, or else `data`."""
        value = getattr(settings, name, None)
        return getattr(data, name) if value is None else value

    functions = reward_functions(config)
    columns = Columns(
        prompt=own("prompt_key"),
        answer=own("answer_key"),
        domain=None if domain else data.domain_key,
        response=own("response_key") if learns_answers else None,
        answer_required=judged and _needs_answers({domain: functions.get(domain, ())} if domain else functions),
        messages=own("messages_key") if learns_answers else None,
        tools=own("tools_key"),
        is_chat=own("prompt_format") == "chat",
        only_domain=domain or DEFAULT_DOMAIN,
        group=f"data.domains.{domain}" if domain else "data",
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
        num_workers=data.num_loader_workers,
    )
    return DataSource(key, files, max_samples, columns, data.bad_rows, options, domain)


def _needs_answers(functions: Mapping[str, Sequence[RewardPart]]) -> bool:
    """The verifiers that compare need an answer in each row; a user's own may not."""
    names = {part.name for parts in functions.values() for part in parts}
    return any(name in REWARDS and REWARDS[name].needs_answer for name in names)
