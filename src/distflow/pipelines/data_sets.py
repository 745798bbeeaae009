"""From the config's files to prompts, for training and for validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.names import REWARDS
from distflow.config.program import is_rl
from distflow.data.prompts import PromptOptions, PromptSet, encode_rows
from distflow.data.rows import BadRows, Columns, RawRow
from distflow.data.sources import load_rows
from distflow.rollout.engine import SamplingParams
from distflow.runtime.parts import ValidationSet

Rows = tuple[list[RawRow], BadRows]


def read_train(config: Config, run_dir: Path) -> Rows:
    """The rows of `data.train_files`. Raises UserError for data that cannot be read."""
    return _read(config, run_dir, config.data.train_files, "data.train_files", config.data.train_max_samples)


def read_held_out(config: Config, run_dir: Path) -> Rows | None:
    """The rows of `data.val_files`, or None where no file is named."""
    if not config.data.val_files:
        return None
    return _read(config, run_dir, config.data.val_files, "data.val_files", config.data.val_max_samples)


def train_prompts(config: Config, rows: Rows, tokenizer: Any) -> PromptSet:
    """The rows as token ids. Raises UserError where fewer than one batch are left."""
    prompts, wanted = encode(config, rows, tokenizer), config.data.train_batch_size
    if len(prompts) < wanted:
        raise UserError(
            f"data.train_batch_size={wanted} is larger than the data set ({prompts.report.lines()[0]} "
            f"of data.train_files): set it to at most {len(prompts)}"
        )
    return prompts


def validation_set(config: Config, prompts: PromptSet, sampling: SamplingParams) -> ValidationSet:
    """How `rollout.val_kwargs` wants them answered."""
    settings = config.actor_rollout_ref.rollout.val_kwargs
    ends: dict[str, Any] = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    greedy = SamplingParams(sampling.max_tokens, greedy=True, **ends)
    sampled = SamplingParams(sampling.max_tokens, settings.temperature, settings.top_p, settings.top_k, **ends)
    return ValidationSet(
        "val", prompts, greedy if settings.greedy else None, sampled if settings.n else None, settings.n
    )


def _read(config: Config, run_dir: Path, files: Sequence[str], key: str, max_samples: int) -> Rows:
    data, learns_answers = config.data, not is_rl(config)
    columns = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        domain=data.domain_key,
        response=data.response_key if learns_answers else None,
        answer_required=not learns_answers and _needs_answers(config),
    )
    return load_rows(files, columns, key=key, bad_rows=data.bad_rows, max_samples=max_samples, run_folder=run_dir)


def encode(config: Config, rows: Rows, tokenizer: Any) -> PromptSet:
    """Rows as token ids, by the keys of `data`."""
    data = config.data
    options = PromptOptions(
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        prompt_format=data.prompt_format,
        prompt_template=data.prompt_template,
        system_prompt=data.system_prompt,
        enable_thinking=data.enable_thinking,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        num_workers=data.num_loader_workers,
    )
    raw, bad = rows
    return encode_rows(raw, tokenizer, options, bad)


def _needs_answers(config: Config) -> bool:
    """The verifiers that compare need an answer in each row; a user's own may not."""
    names = {part.name for parts in config.reward.functions.values() for part in parts}
    return any(name in REWARDS and REWARDS[name].needs_answer for name in names)
