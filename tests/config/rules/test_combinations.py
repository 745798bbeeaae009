"""The rules of combinations: each is registered, and a problem names the first key of several that
fits."""

import inspect

import pytest

from distflow.config import ConfigError, load_config
from distflow.config.rules import Findings, check_config

GOOD = ("data.train_files=train.jsonl", "actor_rollout_ref.model.path=model")


@pytest.mark.parametrize("subject", check_config.SUBJECTS, ids=lambda subject: subject.__name__)
def test_each_rule_of_a_subject_is_in_its_tuple(subject):
    """A function that yields findings, and is not private, is a rule."""
    rules = {
        function
        for name, function in inspect.getmembers(subject, inspect.isfunction)
        if function.__module__ == subject.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation is Findings
    }
    assert rules == {*subject.RULES}


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


def test_a_rule_of_sampling_judges_each_name_that_the_user_chose():
    domains = "data.domains={a-b: {train_files: a.jsonl, reward: math, top_k: 0}}"
    assert problems_of(domains, "~data.train_files") == [["data.domains.a-b.top_k"]]


CORRECTION = "algorithm.rollout_correction"
CENTERING = f"{CORRECTION}.score_centering"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("others", "key"),
    [
        ([f"{ACTOR}.policy_loss=gspo"], f"{ACTOR}.policy_loss"),
        ([f"{ACTOR}.policy_loss=mine.py:loss"], f"{ACTOR}.policy_loss"),
        (
            ["algorithm.domains={code: {policy_loss: gmpo}}", "data.domains={code: {}}"],
            "algorithm.domains.code.policy_loss",
        ),
        ([f"{ACTOR}.policy_loss=decoupled"], CENTERING),
        ([f"{CORRECTION}.rollout_is=sequence"], f"{CORRECTION}.rollout_is"),
        (
            [
                f"{CORRECTION}.rollout_is=token",
                f"{CORRECTION}.rollout_is_batch_normalize=true",
            ],
            f"{CORRECTION}.rollout_is_batch_normalize",
        ),
        (
            [f"{CORRECTION}.rollout_rs=[token_k2]", f"{CORRECTION}.rollout_rs_threshold=0.1"],
            f"{CORRECTION}.rollout_rs",
        ),
        ([f"{ACTOR}.off_policy_mask_threshold=0.5"], f"{ACTOR}.off_policy_mask_threshold"),
        ([f"{CORRECTION}.rollout_is=token", f"{ROLLOUT}.top_k=5"], f"{ROLLOUT}.top_k"),
        ([f"{ROLLOUT}.name=vllm"], CENTERING),
        (["algorithm.recompute_old_log_probs=false"], "algorithm.recompute_old_log_probs"),
    ],
)
def test_scores_are_centered_only_with_what_it_is_defined_for(others, key):
    found = problems_of(f"{CENTERING}=true", *others)
    assert [key, CENTERING] in [[places[0], CENTERING] for places in found if CENTERING in places]


@pytest.mark.parametrize(
    "others",
    [
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=[0.5, 2.0]"],
        [f"{ACTOR}.policy_loss=decoupled", f"{CORRECTION}.rollout_is=token"],
        [f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.name=hf", "async.max_staleness=2"],
    ],
)
def test_scores_are_centered_with_weights_of_tokens(others):
    loaded = load_config("grpo", [*GOOD, f"{CENTERING}=true", *others])
    assert loaded.config.algorithm.rollout_correction.score_centering_top_k == 20
