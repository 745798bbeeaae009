"""How prompts are answered, those that are trained on and those held out."""

from collections.abc import Mapping
from typing import Any

from distflow.config import Config
from distflow.config.by_domain import response_limit, validates
from distflow.config.program import is_rl
from distflow.data.encoded import EncodedRows, write_encoded
from distflow.data.prompts import PromptSet
from distflow.rollout.engine import SamplingParams
from distflow.runtime.spec import ValidationSet


def sampling_params(config: Config, domain: str = "") -> SamplingParams:
    """Of prompts that are trained on; the domain's own where it has some."""
    own = config.data.domains.get(domain)
    longest = response_limit(config, domain)
    if not is_rl(config):
        return SamplingParams(longest)
    settings = config.actor_rollout_ref.rollout

    def chosen(name: str) -> Any:
        value = getattr(own, name, None)
        return getattr(settings, name) if value is None else value

    return SamplingParams(
        longest,
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=chosen("top_k"),
        min_p=chosen("min_p"),
        repetition_penalty=chosen("repetition_penalty"),
        stop=tuple(chosen("stop")),
    )


def validation_sets(config: Config, held_out: Mapping[str, PromptSet]) -> tuple[ValidationSet, ...]:
    """One set, or one for each domain that has some, under its name."""
    sets = []
    for domain, prompts in held_out.items():
        rows = EncodedRows(write_encoded(prompts, config.trainer.run_dir, f"val-{domain}" if domain else "val"))
        sets.append(ValidationSet(domain or "val", rows, *validation_params(config, sampling_params(config, domain))))
    return tuple(sets)


def validation_params(
    config: Config, sampling: SamplingParams
) -> tuple[SamplingParams | None, SamplingParams | None, int]:
    """How `rollout.val_kwargs` wants held-out prompts answered: greedily, by sampling, how often."""
    if not validates(config) or not is_rl(config):
        return None, None, 0
    settings = config.actor_rollout_ref.rollout.val_kwargs
    greedy = SamplingParams(sampling.max_tokens, greedy=True, stop=sampling.stop) if settings.greedy else None
    if settings.n == 0:
        return greedy, None, 0
    sampled = SamplingParams(
        sampling.max_tokens, settings.temperature, settings.top_p, settings.top_k, stop=sampling.stop
    )
    return greedy, sampled, settings.n
