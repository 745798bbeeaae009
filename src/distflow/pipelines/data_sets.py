"""From the config's files to prompts, for training and for validation."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.names import REWARDS
from distflow.config.program import is_rl
from distflow.data.prompts import PromptOptions, PromptSet, encode_rows
from distflow.data.rows import BadRows, Columns, RawRow
from distflow.data.sources import load_rows
from distflow.models.tokenizer import end_token_ids

Rows = tuple[list[RawRow], BadRows]


@dataclass(frozen=True)
class DataSource:
    """Where rows come from and how they become prompts. key: that of the config which names the files."""

    key: str
    files: tuple[str, ...]
    max_samples: int
    columns: Columns
    bad_rows: str
    options: PromptOptions

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


def train_source(config: Config, judged: bool) -> DataSource:
    """judged: the rows' answers go to verifiers."""
    data = config.data
    return _source(config, "data.train_files", data.train_files, data.train_max_samples, judged)


def held_out_source(config: Config, judged: bool) -> DataSource | None:
    """None where no file is named."""
    data = config.data
    return _source(config, "data.val_files", data.val_files, data.val_max_samples, judged) if data.val_files else None


def _source(config: Config, key: str, files: tuple[str, ...], max_samples: int, judged: bool) -> DataSource:
    data, learns_answers = config.data, not is_rl(config)
    columns = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        domain=data.domain_key,
        response=data.response_key if learns_answers else None,
        answer_required=judged and _needs_answers(config),
        messages=data.messages_key if learns_answers else None,
        tools=data.tools_key,
        is_chat=data.prompt_format == "chat",
    )
    options = PromptOptions(
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        prompt_format=data.prompt_format,
        prompt_template=data.prompt_template,
        system_prompt=data.system_prompt,
        enable_thinking=data.enable_thinking,
        template_kwargs=data.apply_chat_template_kwargs,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        num_workers=data.num_loader_workers,
    )
    return DataSource(key, files, max_samples, columns, data.bad_rows, options)


def _needs_answers(config: Config) -> bool:
    """The verifiers that compare need an answer in each row; a user's own may not."""
    names = {part.name for parts in config.reward.functions.values() for part in parts}
    return any(name in REWARDS and REWARDS[name].needs_answer for name in names)
