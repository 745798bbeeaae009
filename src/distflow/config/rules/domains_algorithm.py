"""Rules of `algorithm.domains`: what holds for the run's algorithm holds for each domain's."""

from collections.abc import Iterator
from dataclasses import replace

from distflow.config.domain_algorithm import config_of, takes_values
from distflow.config.errors import nearest
from distflow.config.program import CUSTOM, is_rl, may_have_critic, program_name
from distflow.config.rules import advantages, algorithm, program
from distflow.config.rules.finding import ROLLOUT, Finding
from distflow.config.schema import Config

_RULES = (program.group_of_one, program.known_names, *advantages.RULES, algorithm.kl_control, algorithm.kl_terms_count)


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
    """A domain whose estimator reads values has a program with a critic."""
    if not is_rl(config) or program_name(config) == CUSTOM or may_have_critic(config):
        return
    for domain in config.algorithm.domains:
        own = config_of(config, domain).algorithm
        if takes_values(own):
            yield Finding(
                (f"algorithm.domains.{domain}.adv_estimator", "dag.pipeline"),
                f"{own.adv_estimator} needs the values of a critic, and the program {program_name(config)} has none",
                "set dag.pipeline=rlvr, or an estimator without a critic such as reinforce",
            )


def known(config: Config) -> Iterator[Finding]:
    """Where the run names its domains, this is about them."""
    domains = config.data.domains
    for domain in config.algorithm.domains:
        if domains and domain not in domains:
            near = nearest(domain, domains)
            yield Finding(
                (f"algorithm.domains.{domain}", "data.domains"),
                f"there is no domain '{domain}'",
                f"{f'did you mean {near}? ' if near else ''}the domains are {', '.join(domains)}",
            )


RULES = (of_each, critics, known)
