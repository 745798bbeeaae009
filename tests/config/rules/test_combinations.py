"""The table of combinations: what its rows name exists, and a problem names the first key of
several that fits."""

import re
from dataclasses import fields

import pytest

from distflow.config import Config, ConfigError, flatten, load_config
from distflow.config.keys.schema import schema_keys
from distflow.config.migration.tables import constant, expand
from distflow.config.rules.combinations import _BUILT_IN, _CONDITION, _FACTS, _rules

GOOD = ("data.train_files=train.jsonl", "actor_rollout_ref.model.path=model")
WITHOUT_KEY = {"key", "default", "pipeline", "head"}


@pytest.mark.parametrize("table", ["algorithm", "run"])
def test_rows_name_keys_and_facts_that_exist(table):
    keys = flatten(Config())
    for rule in _rules(table, (*keys, "data.domains.a.top_k", "reward_model.models.m.sharded")):
        for condition in (*rule["when"], *rule.get("if", ())):
            found = _CONDITION.fullmatch(condition)
            if found is None:
                assert condition.removeprefix("not ") in _FACTS, condition
            else:
                assert keys.keys() >= {
                    key for key in expand(found[1]) if not re.search(r"\.(a|m)\.", key)
                }, condition
        for text in (rule["what"], rule["advice"]):
            assert {*re.findall(r"\{([\w.]+)\}", text)} <= {*keys, *WITHOUT_KEY}, text
            assert not re.search("EACH|TEXT", text), text


@pytest.mark.parametrize("table", ["algorithm", "run"])
def test_rows_name_values_that_exist(table):
    """A misspelt one would never hold."""
    for rule in _rules(table, tuple(flatten(Config()))):
        for condition in (*rule["when"], *rule.get("if", ())):
            keys, verb, wanted = (
                found.groups() if (found := _CONDITION.fullmatch(condition)) else ("", None, "")
            )
            for key in expand(keys) if verb in ("is", "is not") else ():
                info = schema_keys()[key]
                built_in = _BUILT_IN.get(key, {})
                known = {"set", "default", *info.spec.choices, *built_in} | (
                    {"built-in"} if built_in else set()
                )
                known |= {
                    each.name
                    for entry in built_in.values()
                    for each in fields(entry)
                    if isinstance(each.default, bool)
                }
                for word in wanted.split(" or ") if info.spec.choices or built_in else ():
                    assert word in known or not isinstance(constant(word), str), condition


def problems_of(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", [*GOOD, *overrides])
    return [
        [subject.split(" = ")[0] for subject, _ in problem.places]
        for problem in caught.value.problems
    ]


def test_a_problem_names_the_first_key_that_fits():
    norm = "algorithm.reward_norm"
    estimator = "algorithm.adv_estimator"
    both = [f"{norm}={{mean_level: batch, std_level: batch}}"]
    assert problems_of(*both) == [[f"{norm}.mean_level", estimator]]
    assert problems_of(f"{norm}.std_level=batch") == [[f"{norm}.std_level", estimator]]


def test_a_pattern_stands_for_each_name_that_the_user_chose():
    domains = "data.domains={a-b: {train_files: a.jsonl, reward: math, top_k: 0}}"
    assert problems_of(domains, "~data.train_files") == [["data.domains.a-b.top_k"]]
