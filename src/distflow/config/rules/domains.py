"""Rules of domains: `data.domains`, and `algorithm.domains`, for which the rules of the run's algorithm hold too."""

from collections.abc import Iterator
from dataclasses import replace

from distflow.builtin_names import CURRICULA
from distflow.config.compose.values import did_you_mean
from distflow.config.derived_settings import (
    CUSTOM,
    config_of,
    find_pipeline,
    is_rl,
    may_have_critic,
    pipeline_name,
    takes_values,
)
from distflow.config.keys.data import DomainConfig
from distflow.config.keys.schema import Config
from distflow.config.per_domain import reward_functions, unfiltered_domains
from distflow.config.rules import ROLLOUT, Finding, algorithm, normalization, pipeline
from distflow.config.rules.unused_options import unused_options

_LEARNS = ("response_key", "messages_key")
_GENERATES = (
    *("reward", "filter_groups", "skip_outside", "answer_key", "solution_key"),
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"),
)


def one_form(config: Config) -> Iterator[Finding]:
    """Files are named by domain or for all."""
    for name in ("train_files", "val_files") if config.data.domains else ():
        if getattr(config.data, name):
            yield Finding(
                (f"data.{name}", "data.domains"),
                "both name data",
                f"remove data.{name}, or make a domain of it: data.domains.NAME.{name}",
            )


def sources(config: Config) -> Iterator[Finding]:
    """Each domain has data for what it is there for."""
    domains = config.data.domains
    for name, domain in domains.items():
        key = f"data.domains.{name}"
        if domain.weight > 0 and not domain.train_files:
            yield Finding(
                (f"{key}.train_files",),
                f"the domain '{name}' has no data to train on",
                f"set {key}.train_files=FILE.jsonl, or {key}.weight=0 to validate on it only",
            )
        if domain.weight == 0 and not domain.val_files and any(other.weight for other in domains.values()):
            yield Finding(
                (f"{key}.weight", f"{key}.val_files"),
                f"the domain '{name}' is never drawn, and not validated on: it does nothing",
                f"give it a weight or {key}.val_files, or take it out",
            )


def weights(config: Config) -> Iterator[Finding]:
    """Something is drawn."""
    domains = config.data.domains
    if domains and not any(domain.weight for domain in domains.values()):
        yield Finding(
            tuple(f"data.domains.{name}.weight" for name in domains),
            "all weights are 0: nothing would be trained on",
            "give a domain a weight above 0; weights are relative and need not add up to 1",
        )


def curriculum(config: Config) -> Iterator[Finding]:
    """There is something to divide otherwise, and something to go by."""
    name, key = config.data.curriculum.function, "data.curriculum.function"
    if name is None:
        return
    drawn = [domain for domain, settings in config.data.domains.items() if settings.weight]
    if len(drawn) < 2:
        what = f"{drawn[0]} has all places" if drawn else "there are no domains"
        yield Finding((key, "data.domains"), f"it divides steps between domains, and {what}", "remove it")
    if name in CURRICULA and not is_rl(config):
        yield Finding((key,), "it goes by right answers, and the pipeline judges none", "name a function of yours")


def rewards(config: Config) -> Iterator[Finding]:
    """Each domain is judged, and in one way."""
    domains, functions = config.data.domains, config.reward.functions
    if not domains or not is_rl(config):
        return
    judged = reward_functions(config)
    for name, domain in domains.items():
        key = f"data.domains.{name}.reward"
        if name not in judged and find_pipeline(config) is not None:
            yield Finding(
                (key,), f"the domain '{name}' has no verifier", f"set {key}=math, or reward.functions.{name}=[math]"
            )
        if domain.reward and name in functions and functions[name] != domain.reward:
            yield Finding(
                (key, f"reward.functions.{name}"),
                f"they judge the domain '{name}' by different functions",
                "keep one of the two",
            )
    has_default = any(not domain.reward and name not in functions for name, domain in domains.items())
    for name in functions:
        if name not in domains and not (name == "default" and has_default):
            what = "no domain is called so" if name != "default" else "each domain names its own functions"
            yield Finding(
                (f"reward.functions.{name}", "data.domains"),
                what,
                f"{did_you_mean(name, domains)}take it out; the domains are {', '.join(domains)}",
            )


def lengths(config: Config) -> Iterator[Finding]:
    """A domain's responses fit into what there is for all."""
    longest = config.data.max_response_length
    for name, domain in config.data.domains.items():
        key, own = f"data.domains.{name}.max_response_length", domain.max_response_length
        if own is not None and own > longest:
            yield Finding(
                (key, "data.max_response_length"), f"a response may have {longest} tokens at most", "raise the latter"
            )
        zone = config.reward.overlong.buffer_tokens
        if own is not None and 0 < own <= zone:
            yield Finding(
                (key, "reward.overlong.buffer_tokens"),
                f"the zone of the penalty, {zone} tokens, is all of a response of this domain",
                f"raise {key}, or shorten the zone",
            )


def used(config: Config) -> Iterator[Finding]:
    """What is set of a domain does something in the pipeline."""
    default, rollout = DomainConfig(), config.actor_rollout_ref.rollout
    for name, domain in config.data.domains.items():
        for setting in _LEARNS if is_rl(config) else _GENERATES:
            if getattr(domain, setting) != getattr(default, setting):
                what = "samples its answers" if is_rl(config) else "learns the answers of the data"
                yield Finding((f"data.domains.{name}.{setting}",), f"it does nothing: the pipeline {what}", "remove it")
        if domain.pass_rate_key and not (domain.pass_rate or config.data.pass_rate):
            what = "no pass rate is asked for"
            yield Finding((f"data.domains.{name}.pass_rate_key",), what, f"set data.domains.{name}.pass_rate=[0.1,0.9]")
        if name not in unfiltered_domains(config) and (domain.n or (domain.filter_groups and rollout.n)) == 1:
            size = f"data.domains.{name}.n" if domain.n else f"{ROLLOUT}.n"
            yield Finding(
                (f"data.domains.{name}.filter_groups", size),
                "the only sample of a group equals itself: every group would be dropped",
                f"set {size}=8, or data.domains.{name}.filter_groups=false",
            )


RULES = (one_form, sources, weights, curriculum, rewards, lengths, used)


_RULES = (
    pipeline.group_of_one,
    pipeline.known_names,
    *normalization.RULES,
    algorithm.kl_control,
    algorithm.kl_terms_count,
    unused_options,
)


def of_each(config: Config) -> Iterator[Finding]:
    """What the domain alone makes wrong, by its own keys."""
    sized = [name for name, each in config.data.domains.items() if each.n]
    for domain in dict.fromkeys((*config.algorithm.domains, *sized)):
        own = config.algorithm.domains.get(domain, {})
        named = {f"algorithm.{key}": f"algorithm.domains.{domain}.{key}" for key in own}
        if domain in sized:
            named[f"{ROLLOUT}.n"] = f"data.domains.{domain}.n"
        for rule in _RULES:
            for finding in rule(config_of(config, domain)):
                if not named.keys().isdisjoint(finding.keys):
                    advice = finding.advice
                    for key, own_key in named.items():
                        advice = advice.replace(f"{key}=", f"{own_key}=")
                    yield replace(finding, keys=tuple(named.get(key, key) for key in finding.keys), advice=advice)


def critics(config: Config) -> Iterator[Finding]:
    """A domain whose estimator reads values has a pipeline with a critic."""
    if not is_rl(config) or pipeline_name(config) == CUSTOM or may_have_critic(config):
        return
    for domain in config.algorithm.domains:
        own = config_of(config, domain).algorithm
        if takes_values(own):
            yield Finding(
                (f"algorithm.domains.{domain}.adv_estimator", "dag.pipeline"),
                f"{own.adv_estimator} needs the values of a critic, and the pipeline {pipeline_name(config)} has none",
                "set dag.pipeline=rlvr, or an estimator without a critic such as reinforce",
            )


def known(config: Config) -> Iterator[Finding]:
    """Where the run names its domains, this is about them."""
    domains = config.data.domains
    for domain in config.algorithm.domains:
        if domains and domain not in domains:
            yield Finding(
                (f"algorithm.domains.{domain}", "data.domains"),
                f"there is no domain '{domain}'",
                f"{did_you_mean(domain, domains)}the domains are {', '.join(domains)}",
            )


ALGORITHM_RULES = (of_each, critics, known)
