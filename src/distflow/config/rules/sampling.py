"""Rules of sampling: how tokens of responses are drawn, in training and in validation."""

from collections.abc import Iterator
from typing import Any

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config.derived_settings import is_rl, validates
from distflow.config.keys.schema import Config
from distflow.config.rules import ROLLOUT, Finding, Findings

_VALIDATION = f"{ROLLOUT}.val_kwargs"


def samplings(config: Config) -> Iterator[tuple[str, Any]]:
    """Every group of keys with settings of sampling, with its key."""
    rollout = config.actor_rollout_ref.rollout
    yield ROLLOUT, rollout
    yield _VALIDATION, rollout.val_kwargs
    for name, agent in rollout.agents.items():
        yield f"{ROLLOUT}.agents.{name}", agent
    for name, domain in config.data.domains.items():
        yield f"data.domains.{name}", domain


def top_k(config: Config) -> Findings:
    """Some tokens are left to draw from."""
    for key, settings in samplings(config):
        if settings.top_k == 0:
            advice = "set it to -1 (off), or to 1 or more"
            yield Finding((f"{key}.top_k",), "no token would be left", advice)


def stop(config: Config) -> Findings:
    """A string that ends a response has characters."""
    for key, settings in samplings(config):
        if "" in (getattr(settings, "stop", None) or ()):
            what = "the empty string would end every response at once"
            yield Finding((f"{key}.stop",), what, "remove it")


def truncated_distribution(config: Config) -> Findings:
    """Log-probs are those of the distribution that is sampled from."""
    rollout = config.actor_rollout_ref.rollout
    entry = ROLLOUT_ENGINES.get(rollout.name)
    if entry is not None and entry.reports_truncated:
        return

    keys = [
        f"{key}.top_p"
        for key, settings in samplings(config)
        if key.startswith(ROLLOUT) and settings.top_p not in (None, 1)
    ]
    if rollout.repetition_penalty != 1:
        keys.append(f"{ROLLOUT}.repetition_penalty")
    if rollout.min_p != 0:
        keys.append(f"{ROLLOUT}.min_p")

    for key in keys:
        what = (
            f"'{rollout.name}' does not report log-probs under the distribution that it then "
            "samples from"
        )
        yield Finding((key, f"{ROLLOUT}.name"), what, f"remove {key}; top_k is supported")


def validation_responses(config: Config) -> Findings:
    """Validation generates responses."""
    settings = config.actor_rollout_ref.rollout.val_kwargs
    is_none = settings.n == 0 and not settings.greedy
    if is_none and is_rl(config) and validates(config):
        yield Finding(
            (f"{_VALIDATION}.n", f"{_VALIDATION}.greedy"),
            "validation would not generate any response",
            f"set {_VALIDATION}.greedy=true, or {_VALIDATION}.n=4",
        )


RULES = (top_k, stop, truncated_distribution, validation_responses)
