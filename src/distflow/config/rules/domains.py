"""Rules of `data.domains`, and of `algorithm.domains`, to which the rules of the run's algorithm
apply too."""

from collections.abc import Mapping
from dataclasses import replace

from distflow.config.compose.typed_values import did_you_mean
from distflow.config.derived_settings import (
    chooses_by_tags,
    config_of,
    find_pipeline,
    is_rl,
    reward_functions,
)
from distflow.config.keys.algorithm import DIFFERING_LOSS
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


def one_form(config: Config) -> Findings:
    """Files are listed per domain, or once for all domains with tags."""
    domains = config.data.domains
    if not domains:
        return

    have_tags = any(domain.tags for domain in domains.values())
    for name in ("train_files", "val_files"):
        if not getattr(config.data, name):
            continue

        if not have_tags:
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
    """Tags come from a column, and select rows that are read before the run."""
    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}.tags"
        if domain.tags and config.data.tag_key is None:
            what = "the column with the tags is not set"
            yield Finding(("data.tag_key", key), what, "set data.tag_key=tag")

        if domain.tags and config.data.lazy:
            what = "tags cannot select rows that are read one by one"
            yield Finding(("data.lazy", key), what, "set data.lazy=false")


def tag_of_one_domain(config: Config) -> Findings:
    """A tag belongs to one domain."""
    domain_of = dict[str, str]()
    for name, domain in config.data.domains.items():
        for tag in domain.tags:
            first = domain_of.setdefault(tag, name)
            if first != name or domain.tags.count(tag) > 1:
                keys = (f"data.domains.{first}.tags", f"data.domains.{name}.tags")
                yield Finding(keys, f"the tag '{tag}' is named twice", "give it to one domain")


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
    """Some domain is trained on."""
    domains = config.data.domains
    if domains and not any(domain.weight for domain in domains.values()):
        yield Finding(
            tuple(f"data.domains.{name}.weight" for name in domains),
            "all weights are 0: nothing would be trained on",
            "give a domain a weight above 0; weights are relative and need not add up to 1",
        )


def rewards(config: Config) -> Findings:
    """Each domain has reward functions, from one key."""
    functions = config.reward.functions
    scored = reward_functions(config)

    if is_rl(config):
        for name, domain in config.data.domains.items():
            key = f"data.domains.{name}.reward"
            if name not in scored and find_pipeline(config) is not None:
                advice = f"set {key}=math, or reward.functions.{name}=[math]"
                yield Finding((key,), f"the domain '{name}' has no reward function", advice)

            if domain.reward and name in functions and functions[name] != domain.reward:
                what = f"they name different reward functions for the domain '{name}'"
                yield Finding((key, f"reward.functions.{name}"), what, "keep one of the two")


def lengths(config: Config) -> Findings:
    """A domain's response limit is at most the run's, and longer than the penalty zone."""
    longest = config.data.max_response_length
    zone = config.reward.overlong.buffer_tokens

    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}.max_response_length"
        limit = domain.max_response_length
        if limit is not None and limit > longest:
            what = f"a response may have at most {longest} tokens"
            yield Finding((key, "data.max_response_length"), what, "raise the latter")

        if limit is not None and 0 < limit <= zone:
            what = f"the penalty's buffer of {zone} tokens covers the whole response of this domain"
            keys = (key, "reward.overlong.buffer_tokens")
            yield Finding(keys, what, f"raise {key}, or shorten the buffer")


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
    sized = [name for name, domain in config.data.domains.items() if domain.n]
    for domain in dict.fromkeys((*config.algorithm.domains, *sized)):
        named = {}
        for key in config.algorithm.domains.get(domain, ()):
            group = ACTOR if key in DIFFERING_LOSS else "algorithm"
            named[f"{group}.{key}"] = f"algorithm.domains.{domain}.{key}"

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


def known(config: Config) -> Findings:
    """`algorithm.domains`, reward models and teachers name domains of `data.domains`, if there are
    any."""
    domains = config.data.domains
    named = [(f"algorithm.domains.{domain}", domain) for domain in config.algorithm.domains]
    for name, model in config.reward_model.models.items():
        named += [(f"reward_model.models.{name}.domains", domain) for domain in model.domains]
    for name, teacher in config.distill.teachers.items():
        named += [(f"distill.teachers.{name}.domains", domain) for domain in teacher.domains]

    if domains:
        for key, domain in named:
            if domain not in domains:
                advice = f"{did_you_mean(domain, domains)}the domains are {', '.join(domains)}"
                yield Finding((key, "data.domains"), f"there is no domain '{domain}'", advice)


RULES = (
    one_form,
    tags,
    tag_of_one_domain,
    training_data,
    weights,
    rewards,
    lengths,
    of_each,
    known,
)
