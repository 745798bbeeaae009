"""Data and rewards of a config, with or without domains."""

from collections.abc import Iterator, Mapping

from distflow.config.keys.reward import RewardPart
from distflow.config.keys.schema import Config

Files = dict[str, tuple[str, ...]]
"""Files by their keys."""


def train_files(config: Config) -> Files:
    return _files(config, "train_files")


def val_files(config: Config) -> Files:
    return _files(config, "val_files")


def _files(config: Config, name: str) -> Files:
    """Those of domains, and those of all."""
    domains, common = config.data.domains, getattr(config.data, name)
    own = {f"data.domains.{domain}.{name}": getattr(settings, name) for domain, settings in domains.items()}
    return own | ({f"data.{name}": common} if common or not own else {})


def chooses_by_tags(config: Config, domain: str, name: str) -> bool:
    """Whether the rows of the domain are those of the files of `data` with its tags. name: of the key of files."""
    settings = config.data.domains.get(domain)
    return settings is not None and bool(settings.tags and getattr(config.data, name) and not getattr(settings, name))


def domain_of_tag(config: Config) -> dict[str, str]:
    return {tag: name for name, domain in config.data.domains.items() for tag in domain.tags}


def validates(config: Config) -> bool:
    return any(val_files(config).values())


def reward_functions(config: Config) -> Mapping[str, tuple[RewardPart, ...]]:
    """The reward functions by domain, from `reward.functions` and the domains' own `reward`. Without `data.domains`,
    `default` holds for all that are not named; with them, each domain with reward functions is named."""
    functions, domains = config.reward.functions, config.data.domains
    chosen = {
        name: domain.reward or functions.get(name) or functions.get("default", ()) for name, domain in domains.items()
    } or functions
    return {name: tuple(_as_asked(part, config) for part in parts) for name, parts in chosen.items() if parts}


def _as_asked(part: RewardPart, config: Config) -> RewardPart:
    """With the option that `reward.ifeval` sets for a part of IFEval, unless it has its own."""
    is_original = part.name.partition("_")[0] == "ifeval" and not config.reward.ifeval.strict
    return part._replace(options={"strict": False, **part.options}) if is_original else part


def named_rewards(config: Config) -> Iterator[tuple[str, str, tuple[RewardPart, ...]]]:
    """(key, domain, reward functions) for each key that names some."""
    for name, parts in config.reward.functions.items():
        yield f"reward.functions.{name}", name, parts
    for name, domain in config.data.domains.items():
        yield f"data.domains.{name}.reward", name, domain.reward


def response_limit(config: Config, domain: str) -> int:
    """Longest response to a prompt of the domain, in tokens."""
    own = config.data.domains.get(domain)
    longest = config.data.max_response_length
    return longest if own is None or own.max_response_length is None else own.max_response_length


def group_sizes(config: Config) -> dict[str, int]:
    """Responses a prompt by domain; "" without domains."""
    common = config.actor_rollout_ref.rollout.n
    return {name: domain.n or common for name, domain in config.data.domains.items()} or {"": common}


def temperatures(config: Config) -> dict[str, float]:
    """Temperatures of the domains whose temperature is not the run's."""
    common, domains = config.actor_rollout_ref.rollout.temperature, config.data.domains
    own = {name: domain.temperature for name, domain in domains.items() if domain.temperature is not None}
    return {name: temperature for name, temperature in own.items() if temperature != common}


def unfiltered_domains(config: Config) -> frozenset[str]:
    enable = config.algorithm.filter_groups.enable
    return frozenset(
        name
        for name, domain in config.data.domains.items()
        if not (enable if domain.filter_groups is None else domain.filter_groups)
    )


def filters_groups(config: Config) -> bool:
    """Whether groups without a signal are dropped, in at least one domain."""
    if config.data.domains:
        return len(unfiltered_domains(config)) < len(config.data.domains)
    return config.algorithm.filter_groups.enable
