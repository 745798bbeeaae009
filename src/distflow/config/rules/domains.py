"""Rules of `data.domains`, and of `algorithm.domains`, to which the rules of the run's algorithm
apply too."""

from dataclasses import replace

from distflow.builtin_names import CURRICULA, POLICY_LOSSES
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
    *("reward", "filter_groups", "skip_outside", "answer_key", "solution_key"),
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"),
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
        for each in (
            each for each, domain in domains.items() if domain.tags and getattr(domain, name)
        ):
            what = f"both name data of the domain '{each}', which has tags"
            yield Finding(
                (f"data.{name}", f"data.domains.{each}.{name}"), what, "keep one of the two"
            )


def tags(config: Config) -> Findings:
    """A tag belongs to one domain; tags come from a column and select rows of a file."""
    data = config.data
    domain_of = dict[str, str]()
    for name, domain in data.domains.items():
        key = f"data.domains.{name}.tags"
        if domain.tags and data.tag_key is None:
            yield Finding(
                ("data.tag_key", key), "the column with the tags is not set", "set data.tag_key=tag"
            )
        if domain.tags and not any(
            chooses_by_tags(config, name, f"{split}_files") for split in ("train", "val")
        ):
            what = "they select rows of data.train_files, which is not set"
            advice = "set it, or remove the tags"
            yield Finding((key, "data.train_files"), what, advice)
        for tag in domain.tags:
            if domain_of.setdefault(tag, name) != name or domain.tags.count(tag) > 1:
                what = f"the tag '{tag}' is named twice"
                yield Finding(
                    (f"data.domains.{domain_of[tag]}.tags", key), what, "give it to one domain"
                )
    if data.tag_key and not domain_of and not (is_rl(config) and validates(config)):
        advice = "set data.val_files or data.domains.NAME.tags, or remove it"
        yield Finding(("data.tag_key",), "no domain has tags, and there is no validation", advice)


def sources(config: Config) -> Findings:
    """Each domain has data, and some domain is trained on."""
    domains = config.data.domains
    is_trained = any(domain.weight for domain in domains.values())
    for name, domain in domains.items():
        key = f"data.domains.{name}"
        if (
            domain.weight > 0
            and not domain.train_files
            and not chooses_by_tags(config, name, "train_files")
        ):
            yield Finding(
                (f"{key}.train_files",),
                f"the domain '{name}' has no data to train on",
                f"set {key}.train_files=FILE.jsonl, {key}.weight=0 to validate on it only, or "
                f"{key}.tags to select "
                "its rows of data.train_files",
            )
        is_validated = domain.val_files or chooses_by_tags(config, name, "val_files")
        if domain.weight == 0 and not is_validated and is_trained:
            yield Finding(
                (f"{key}.weight", f"{key}.val_files"),
                f"the domain '{name}' is used neither for training nor for validation",
                f"give it a weight or {key}.val_files, or remove it",
            )
    if domains and not is_trained:
        yield Finding(
            tuple(f"data.domains.{name}.weight" for name in domains),
            "all weights are 0: nothing would be trained on",
            "give a domain a weight above 0; weights are relative and need not add up to 1",
        )


def curriculum(config: Config) -> Findings:
    """A curriculum needs several domains and, if built in, scores."""
    name = config.data.curriculum.function
    key = "data.curriculum.function"
    if name is None:
        return
    drawn = [domain for domain, settings in config.data.domains.items() if settings.weight]
    if len(drawn) < 2:
        what = f"only {drawn[0]} is trained on" if drawn else "there are no domains"
        yield Finding(
            (key, "data.domains"), f"it divides steps between domains, and {what}", "remove it"
        )
    if name in CURRICULA and not is_rl(config):
        yield Finding(
            (key,),
            "it needs the scores of responses, but the pipeline has none",
            "name your own function",
        )


def rewards(config: Config) -> Findings:
    """Each domain has reward functions, from one key."""
    domains = config.data.domains
    functions = config.reward.functions
    if not domains or not is_rl(config):
        return
    scored = reward_functions(config)
    for name, domain in domains.items():
        key = f"data.domains.{name}.reward"
        if name not in scored and find_pipeline(config) is not None:
            advice = f"set {key}=math, or reward.functions.{name}=[math]"
            yield Finding((key,), f"the domain '{name}' has no reward function", advice)
        if domain.reward and name in functions and functions[name] != domain.reward:
            what = f"they name different reward functions for the domain '{name}'"
            yield Finding((key, f"reward.functions.{name}"), what, "keep one of the two")
    has_default = any(
        not domain.reward and name not in functions for name, domain in domains.items()
    )
    for name in functions:
        if name not in domains and not (name == "default" and has_default):
            yield Finding(
                (f"reward.functions.{name}", "data.domains"),
                "each domain has its own functions"
                if name == "default"
                else "there is no such domain",
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
    default = DomainConfig()
    rollout = config.actor_rollout_ref.rollout
    for name, domain in config.data.domains.items():
        key = f"data.domains.{name}"
        for setting in _OF_SFT if is_rl(config) else _OF_RL:
            if getattr(domain, setting) != getattr(default, setting):
                what = (
                    "generates its responses"
                    if is_rl(config)
                    else "trains on the responses in the data"
                )
                yield Finding(
                    (f"{key}.{setting}",), f"it has no effect: the pipeline {what}", "remove it"
                )
        if domain.pass_rate_key and not (domain.pass_rate or config.data.pass_rate):
            yield Finding(
                (f"{key}.pass_rate_key",),
                "no pass rate is required",
                f"set {key}.pass_rate=[0.1,0.9]",
            )
        if (
            name not in unfiltered_domains(config)
            and (domain.n or (domain.filter_groups and rollout.n)) == 1
        ):
            size = f"{key}.n" if domain.n else f"{ROLLOUT}.n"
            yield Finding(
                (f"{key}.filter_groups", size),
                "a group has only one sample, so every group would be dropped",
                f"set {size}=8, or {key}.filter_groups=false",
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
        for rule in _RULES_OF_DOMAINS:
            for finding in rule(config_of(config, domain)):
                if not named.keys().isdisjoint(finding.keys):
                    advice = finding.advice
                    for key, own_key in named.items():
                        advice = advice.replace(f"{key}=", f"{own_key}=")
                    yield replace(
                        finding,
                        keys=tuple(named.get(key, key) for key in finding.keys),
                        advice=advice,
                    )


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


RULES = (one_form, tags, sources, curriculum, rewards, lengths, used, of_each, clips, known)
