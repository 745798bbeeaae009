"""Rules of `data.domains`, and of `algorithm.domains`, to which the rules of the run's algorithm
apply too."""

from collections.abc import Mapping
from dataclasses import replace

from distflow.builtin_names import POLICY_LOSSES
from distflow.config.compose.typed_values import did_you_mean
from distflow.config.derived_settings import (
    chooses_by_tags,
    config_of,
    find_pipeline,
    is_rl,
    own_losses,
    reward_functions,
    unfiltered_domains,
    validates,
)
from distflow.config.keys.algorithm import DIFFERING_LOSS
from distflow.config.keys.data import DomainConfig
from distflow.config.keys.schema import Config
from distflow.config.rules import (
    ACTOR,
    ROLLOUT,
    Finding,
    Findings,
    agents,
    estimator,
    kl,
    losses,
    normalization,
)
from distflow.config.rules.pipeline import known_names

_OF_SFT = ("response_key", "messages_key")
_OF_RL = (
    "reward",
    "filter_groups",
    "skip_outside",
    "answer_key",
    "solution_key",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
)


def one_form(config: Config) -> Findings:
    """Files are listed per domain, or once for all domains with tags."""
    domains = config.data.domains
    for name in ("train_files", "val_files") if domains else ():
        if not getattr(config.data, name):
            continue
        if not any(domain.tags for domain in domains.values()):
            advice = (
                f"remove data.{name}, turn it into a domain (data.domains.NAME.{name}), or give "
                "domains tags"
            )
            yield Finding((f"data.{name}", "data.domains"), "both name data", advice)
        for each, domain in domains.items():
            if domain.tags and getattr(domain, name):
                what = f"both name data of the domain '{each}', which has tags"
                keys = (f"data.{name}", f"data.domains.{each}.{name}")
                yield Finding(keys, what, "keep one of the two")


def tags(config: Config) -> Findings:
    """Tags come from a column, and select rows of a file."""
    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}.tags"
        if domain.tags and config.data.tag_key is None:
            what = "the column with the tags is not set"
            yield Finding(("data.tag_key", key), what, "set data.tag_key=tag")
        splits = ("train_files", "val_files")
        if domain.tags and not any(chooses_by_tags(config, name, split) for split in splits):
            what = "they select rows of data.train_files, which is not set"
            yield Finding((key, "data.train_files"), what, "set it, or remove the tags")


def tag_of_one_domain(config: Config) -> Findings:
    """A tag belongs to one domain."""
    domain_of = dict[str, str]()
    for name, domain in config.data.domains.items():
        for tag in domain.tags:
            first = domain_of.setdefault(tag, name)
            if first != name or domain.tags.count(tag) > 1:
                keys = (f"data.domains.{first}.tags", f"data.domains.{name}.tags")
                yield Finding(keys, f"the tag '{tag}' is named twice", "give it to one domain")


def tag_column(config: Config) -> Findings:
    """A column of tags is used by a domain, or to report validation."""
    has_tags = any(domain.tags for domain in config.data.domains.values())
    if config.data.tag_key and not has_tags and not (is_rl(config) and validates(config)):
        advice = "set data.val_files or data.domains.NAME.tags, or remove it"
        yield Finding(("data.tag_key",), "no domain has tags, and there is no validation", advice)


def training_data(config: Config) -> Findings:
    """Each domain that is trained on has data."""
    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}"
        has_data = domain.train_files or chooses_by_tags(config, name, "train_files")
        if domain.weight > 0 and not has_data:
            yield Finding(
                (f"{key}.train_files",),
                f"the domain '{name}' has no data to train on",
                f"set {key}.train_files=FILE.jsonl, {key}.weight=0 to validate on it only, or "
                f"{key}.tags to select its rows of data.train_files",
            )


def weights(config: Config) -> Findings:
    """Some domain is trained on, and each other one is validated on."""
    domains = config.data.domains
    if domains and not any(domain.weight for domain in domains.values()):
        yield Finding(
            tuple(f"data.domains.{name}.weight" for name in domains),
            "all weights are 0: nothing would be trained on",
            "give a domain a weight above 0; weights are relative and need not add up to 1",
        )
        return
    for name, domain in domains.items():
        key = f"data.domains.{name}"
        is_validated = domain.val_files or chooses_by_tags(config, name, "val_files")
        if domain.weight == 0 and not is_validated:
            yield Finding(
                (f"{key}.weight", f"{key}.val_files"),
                f"the domain '{name}' is used neither for training nor for validation",
                f"give it a weight or {key}.val_files, or remove it",
            )


def rewards(config: Config) -> Findings:
    """Each domain has reward functions, from one key."""
    functions = config.reward.functions
    scored = reward_functions(config)
    for name, domain in config.data.domains.items() if is_rl(config) else ():
        key = f"data.domains.{name}.reward"
        if name not in scored and find_pipeline(config) is not None:
            advice = f"set {key}=math, or reward.functions.{name}=[math]"
            yield Finding((key,), f"the domain '{name}' has no reward function", advice)
        if domain.reward and name in functions and functions[name] != domain.reward:
            what = f"they name different reward functions for the domain '{name}'"
            yield Finding((key, f"reward.functions.{name}"), what, "keep one of the two")


def scored_domains(config: Config) -> Findings:
    """Reward functions are those of a domain, or the default of one."""
    domains = config.data.domains
    known = {*domains}
    for name, domain in domains.items():
        if not domain.reward and name not in config.reward.functions:
            known.add("default")
    for name in config.reward.functions if domains and is_rl(config) else ():
        if name not in known:
            is_default = name == "default"
            own = "each domain has its own functions"
            yield Finding(
                (f"reward.functions.{name}", "data.domains"),
                own if is_default else "there is no such domain",
                f"{did_you_mean(name, domains)}remove it; the domains are {', '.join(domains)}",
            )


def lengths(config: Config) -> Findings:
    """A domain's response limit is at most the run's, and longer than the penalty zone."""
    longest = config.data.max_response_length
    zone = config.reward.overlong.buffer_tokens
    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}.max_response_length"
        own = domain.max_response_length
        if own is not None and own > longest:
            what = f"a response may have at most {longest} tokens"
            yield Finding((key, "data.max_response_length"), what, "raise the latter")
        if own is not None and 0 < own <= zone:
            what = f"the penalty's buffer of {zone} tokens covers the whole response of this domain"
            yield Finding(
                (key, "reward.overlong.buffer_tokens"), what, f"raise {key}, or shorten the buffer"
            )


def used(config: Config) -> Findings:
    """Every setting of a domain has an effect in the pipeline."""
    settings: tuple[str, ...] = _OF_RL
    what = "it has no effect: the pipeline trains on the responses in the data"
    if is_rl(config):
        settings = _OF_SFT
        what = "it has no effect: the pipeline generates its responses"
    for name, domain in config.data.domains.items():
        for setting in settings:
            if getattr(domain, setting) != getattr(DomainConfig, setting):
                yield Finding((f"data.domains.{name}.{setting}",), what, "remove it")


def pass_rates(config: Config) -> Findings:
    """A column of pass rates is read if they are bounded."""
    for name, domain in config.data.domains.items():
        if domain.pass_rate_key and not (domain.pass_rate or config.data.pass_rate):
            key = f"data.domains.{name}.pass_rate"
            advice = f"set {key}=[0.1,0.9]"
            yield Finding((f"{key}_key",), "no pass rate is required", advice)


def filtered_groups(config: Config) -> Findings:
    """A filtered group of a domain has several samples."""
    common = config.actor_rollout_ref.rollout.n
    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}"
        size = domain.n or (domain.filter_groups and common)
        if size == 1 and name not in unfiltered_domains(config):
            size_key = f"{key}.n" if domain.n else f"{ROLLOUT}.n"
            yield Finding(
                (f"{key}.filter_groups", size_key),
                "a group has only one sample, so every group would be dropped",
                f"set {size_key}=8, or {key}.filter_groups=false",
            )


_RULES_OF_DOMAINS = (
    known_names,
    *agents.RULES,
    *estimator.RULES,
    *kl.RULES,
    *losses.RULES,
    *normalization.RULES,
)


def of_each(config: Config) -> Findings:
    """The rules of the run's algorithm apply to each domain's settings; findings name the domain's
    keys."""
    sized = [name for name, each in config.data.domains.items() if each.n]
    for domain in dict.fromkeys((*config.algorithm.domains, *sized)):
        own = config.algorithm.domains.get(domain, {})
        groups = {key: ACTOR if key in DIFFERING_LOSS else "algorithm" for key in own}
        named = {
            f"{group}.{key}": f"algorithm.domains.{domain}.{key}" for key, group in groups.items()
        }
        if domain in sized:
            named[f"{ROLLOUT}.n"] = f"data.domains.{domain}.n"
        judged = config_of(config, domain)
        for rule in _RULES_OF_DOMAINS:
            for finding in rule(judged):
                if not named.keys().isdisjoint(finding.keys):
                    yield _renamed(finding, named)


def _renamed(finding: Finding, named: Mapping[str, str]) -> Finding:
    """The finding with other names of keys."""
    advice = finding.advice
    for key, own in named.items():
        advice = advice.replace(f"{key}=", f"{own}=")
    return replace(finding, keys=tuple(named.get(key, key) for key in finding.keys), advice=advice)


def clips(config: Config) -> Findings:
    """A domain sets the clip of a loss that has one."""
    for domain in own_losses(config):
        loss = POLICY_LOSSES.get(config_of(config, domain).actor_rollout_ref.actor.policy_loss)
        for name in config.algorithm.domains[domain] if loss is not None and not loss.clips else ():
            if name.startswith("clip_ratio"):
                keys = (
                    f"algorithm.domains.{domain}.{name}",
                    f"algorithm.domains.{domain}.policy_loss",
                )
                yield Finding(keys, "the loss of the domain has no clip", f"remove {keys[0]}")


def known(config: Config) -> Findings:
    """`algorithm.domains` and reward models name domains of `data.domains`, if there are any."""
    domains = config.data.domains
    named = [(f"algorithm.domains.{domain}", domain) for domain in config.algorithm.domains]
    for name, model in config.reward_model.models.items():
        named += [(f"reward_model.models.{name}.domains", domain) for domain in model.domains]
    for key, domain in named if domains else ():
        if domain not in domains:
            advice = f"{did_you_mean(domain, domains)}the domains are {', '.join(domains)}"
            yield Finding((key, "data.domains"), f"there is no domain '{domain}'", advice)


RULES = (
    one_form,
    tags,
    tag_of_one_domain,
    tag_column,
    training_data,
    weights,
    rewards,
    scored_domains,
    lengths,
    used,
    pass_rates,
    filtered_groups,
    of_each,
    clips,
    known,
)
