"""From the config to the verifiers of a run: which there are, and what their verdicts may cost."""

from typing import NamedTuple

from distflow.config import Config
from distflow.config.by_domain import reward_functions
from distflow.config.reward import patience_of
from distflow.rewards.functions import Functions
from distflow.rewards.pools import Patience


class Verifiers(NamedTuple):
    """The first arguments of `pool_settings`. domains: those with a patience of their own. custom: where the user's
    function is, as (path, name)."""

    functions: Functions
    patience: Patience
    domains: dict[str, Patience]
    custom: tuple[str, str] | None


def verifiers_of(config: Config) -> Verifiers:
    """Loads none of them, nor torch."""
    settings, custom = config.reward, config.custom_reward_function
    return Verifiers(
        reward_functions(config),
        Patience(**patience_of(settings, "")),
        {name: Patience(**patience_of(settings, name)) for name in settings.domains},
        (custom.path, custom.name) if custom.path else None,
    )
