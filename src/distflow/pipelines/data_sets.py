"""From the config's files to prompts, for training and for validation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.by_domain import reward_functions
from distflow.config.errors import UserError
from distflow.config.names import REWARDS, Reward
from distflow.config.program import is_rl
from distflow.config.reward import RewardPart
from distflow.data.prompts import PromptOptions, PromptSet
from distflow.data.rows import DEFAULT_DOMAIN, BadRows, Columns, RawRow, listed
from distflow.data.sources import load_rows
from distflow.data.tokenising import encode_rows
from distflow.models.tokenizer import end_token_ids
from distflow.rewards.broken_rows import find_broken

Rows = tuple[list[RawRow], BadRows]


@dataclass(frozen=True)
class DataSource:
    """Where rows come from and how they become prompts. key: that of the config which names the files. domain: "" of
    rows that say theirs themselves. rewards: by domain, where rows on which these can give no verdict are left out, or
    are an error as `broken_tests` says; None keeps them."""

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
        """Raises UserError for data that cannot be read, and where most rows are broken."""
        rows, bad = load_rows(
            self.files,
            self.columns,
            key=self.key,
            bad_rows=self.bad_rows,
            max_samples=self.max_samples,
            run_folder=run_dir,
        )
        return (rows if self.rewards is None else self._judgeable(rows, bad), bad)

    def _judgeable(self, rows: list[RawRow], bad: BadRows) -> list[RawRow]:
        assert self.rewards is not None
        good = []
        for row in rows:
            parts = self.rewards.get(row.domain) or self.rewards.get("default", ())
            if why := find_broken([part.name for part in parts], row.answer, row.extra_info):
                bad.broken.append(f"{row.origin}: {why}")
            else:
                good.append(row)
        if bad.broken and (self.broken_tests == "error" or 2 * len(bad.broken) > len(rows)):
            advice = "repair them, or leave such rows out with data.broken_tests=skip"
            if self.broken_tests != "error":
                advice = "most of them: see data.answer_key and reward.functions"
            raise UserError(f"{self.key}: {listed(bad.broken, 'row', 'whose tests are broken')}\n{advice}")
        return good

    def encode(self, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
        """Rows as token ids. Raises UserError for rows that cannot be encoded."""
        raw, bad = rows
        return encode_rows(raw, tokenizer, self.options, bad, end_token_ids(tokenizer))


def train_sources(config: Config, judged: bool) -> list[DataSource]:
    """One, or one for each domain that is drawn from. judged: the rows' answers go to verifiers."""
    data = config.data
    if not data.domains:
        found = [_source(config, "data.train_files", data.train_files, data.train_max_samples, judged, trains=True)]
    else:
        found = [
            _source(
                config,
                f"data.domains.{name}.train_files",
                domain.train_files,
                domain.train_max_samples,
                judged,
                name,
                trains=True,
            )
            for name, domain in data.domains.items()
            if domain.weight
        ]
    if not judged:
        return found
    return [replace(each, rewards=reward_functions(config), broken_tests=data.broken_tests) for each in found]


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
    config: Config,
    key: str,
    files: tuple[str, ...],
    max_samples: int,
    judged: bool,
    domain: str = "",
    trains: bool = False,
) -> DataSource:
    """trains: rows may be chosen by how hard they are; what validates is as it is."""
    data, learns_answers = config.data, not is_rl(config)
    settings = data.domains.get(domain) if domain else None

    def own(name: str) -> Any:
        """What the domain says, or else `data`."""
        value = getattr(settings, name, None)
        return getattr(data, name) if value is None else value

    rewards = _rewards(config, domain)
    group = f"data.domains.{domain}" if domain else "data"
    pass_rate = own("pass_rate") if trains else None
    columns = Columns(
        prompt=own("prompt_key"),
        answer=own("answer_key"),
        domain=None if domain else data.domain_key,
        response=own("response_key") if learns_answers else None,
        answer_required=judged and any(reward.needs_answer for reward in rewards),
        messages=own("messages_key") if learns_answers else None,
        tools=own("tools_key"),
        is_chat=own("prompt_format") == "chat",
        only_domain=domain or DEFAULT_DOMAIN,
        group=group,
        pass_rate=None if pass_rate is None else own("pass_rate_key"),
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
        keep_messages=judged and any(reward.reads_messages for reward in rewards),
        num_workers=data.num_loader_workers,
        pass_rate=pass_rate,
        group=group,
    )
    return DataSource(key, files, max_samples, columns, data.bad_rows, options, domain)


def _rewards(config: Config, domain: str) -> list[Reward]:
    """The built-in ones that judge the domain, or any where there is one source: of a user's own nothing is known."""
    functions = reward_functions(config)
    parts = functions.get(domain, ()) if domain else [part for own in functions.values() for part in own]
    return [REWARDS[part.name] for part in parts if part.name in REWARDS]
