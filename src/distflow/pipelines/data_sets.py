"""From the config's files to prompts, for training and for validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.program import is_rl
from distflow.data.prompts import PromptOptions, PromptSet, encode_rows
from distflow.data.rows import Columns
from distflow.data.sources import load_rows
from distflow.rollout.engine import SamplingParams
from distflow.runtime.parts import ValidationSet


def train_prompts(config: Config, tokenizer: Any, run_dir: Path) -> PromptSet:
    """Raises UserError for data that cannot be read, or fewer rows than one batch."""
    data = config.data
    prompts = _prompts(config, tokenizer, run_dir, data.train_files, "data.train_files", data.train_max_samples)
    if len(prompts) < data.train_batch_size:
        raise UserError(
            f"data.train_batch_size={data.train_batch_size} is larger than the data set ({prompts.report.lines()[0]} "
            f"of data.train_files): set it to at most {len(prompts)}"
        )
    return prompts


def validation_prompts(config: Config, tokenizer: Any, run_dir: Path) -> PromptSet | None:
    """The held-out prompts, or None where no file is named."""
    data = config.data
    if not data.val_files:
        return None
    return _prompts(config, tokenizer, run_dir, data.val_files, "data.val_files", data.val_max_samples)


def validation_set(config: Config, prompts: PromptSet, sampling: SamplingParams) -> ValidationSet:
    """How `rollout.val_kwargs` wants them answered."""
    settings = config.actor_rollout_ref.rollout.val_kwargs
    ends: dict[str, Any] = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    greedy = SamplingParams(sampling.max_tokens, greedy=True, **ends)
    sampled = SamplingParams(sampling.max_tokens, settings.temperature, settings.top_p, settings.top_k, **ends)
    return ValidationSet(
        "val", prompts, greedy if settings.greedy else None, sampled if settings.n else None, settings.n
    )


def _prompts(
    config: Config, tokenizer: Any, run_dir: Path, files: Sequence[str], key: str, max_samples: int
) -> PromptSet:
    data, learns_answers = config.data, not is_rl(config)
    columns = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        domain=data.domain_key,
        response=data.response_key if learns_answers else None,
        answer_required=not learns_answers and _needs_answers(config),
    )
    raw, bad = load_rows(files, columns, key=key, bad_rows=data.bad_rows, max_samples=max_samples, run_folder=run_dir)
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
    return encode_rows(raw, tokenizer, options, bad)


def _needs_answers(config: Config) -> bool:
    """The verifiers that compare need an answer in each row; a user's own may not."""
    names = {part.name for parts in config.reward.functions.values() for part in parts}
    return bool(names & {"math", "exact_match"})
