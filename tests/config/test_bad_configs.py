"""A hundred bad configs: each is refused with the key to change, what is wrong with it, and what to
do."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import ConfigError, load_config
from distflow.config.compose.setting_origins import is_preset
from distflow.config.rules.check_config import check
from tests.sparse_params import one_fast_in

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
GOOD = ("data.train_files=train.jsonl", f"{MODEL}.path=model")


@dataclass
class Bad:
    """A case of `bad_configs.txt`. Its first line is a name, and the preset if that is not grpo."""

    preset: str
    overrides: list[str] = field(default_factory=list)
    """Lines with +."""

    key: str = ""
    """That is named first: the line with =, else that of the last override."""

    parts: list[str] = field(default_factory=list)
    """Of the message: lines with >."""


def read_case(text):
    first, *lines = text.splitlines()
    bad = Bad(first.removesuffix("]").partition(" [")[2] or "grpo")
    for line in lines:
        kind, _, value = line.partition(" ")
        if kind == "+":
            bad.overrides.append(value)
            bad.key = value.lstrip("+~").split("=")[0]
        elif kind == "=":
            bad.key = value
        else:
            bad.parts.append(value)

    return bad


CASES = Path(__file__).with_name("bad_configs.txt").read_text().split("\n\n")
BAD = {case.partition("\n")[0]: read_case(case) for case in CASES}


@pytest.mark.parametrize("name", one_fast_in(3, BAD))
def test_a_bad_config_is_refused_with_its_key_and_what_to_do(name):
    bad = BAD[name]
    with pytest.raises(ConfigError) as caught:
        load_config(bad.preset, [*GOOD, *bad.overrides])
    problems = caught.value.problems
    assert len(problems) == 1, f"one mistake gave {len(problems)} problems:\n{caught.value}"
    subject, where = problems[0].places[0]
    assert subject.split(" = ")[0] == bad.key.split(" = ")[0]
    assert where == "default" or where == "command line" or is_preset(where)
    assert problems[0].advice, "says what to do"
    for part in bad.parts:
        assert part in str(problems[0])


def test_all_problems_come_at_once():
    overrides = [
        "data.seed=x",
        "foo=1",
        "data.seed=[1",
        f"{ROLLOUT}.top_p=2",
        f"{ROLLOUT}.n=1",
        "data.seeed=1",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", overrides)
    named = [problem.places[0][0].split(" = ")[0] for problem in caught.value.problems]
    expected = [
        "data.seed",
        "foo",
        "'data.seed=[1'",
        f"{ROLLOUT}.top_p",
        f"{ROLLOUT}.n",
        "data.seeed",
    ]
    assert sorted(named) == sorted([*expected, "data.train_files", f"{MODEL}.path"])
    assert str(caught.value).startswith("8 problems in the config\n")


def test_no_rule_judges_a_value_that_could_not_be_read():
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", [*GOOD, f"{ROLLOUT}.n=one", "data.train_batch_size=-5"])
    assert [problem.places[0][0] for problem in caught.value.problems] == [
        f"{ROLLOUT}.n",
        "data.train_batch_size",
    ]


def test_the_registration_of_an_engine_says_what_its_server_can(monkeypatch):
    plain = ROLLOUT_ENGINES["vllm"]
    server = [*GOOD, f"{ROLLOUT}.name=vllm"]
    load_config("grpo", [*server, f"{ROLLOUT}.top_p=0.9"])
    monkeypatch.setitem(
        ROLLOUT_ENGINES,
        "vllm",
        replace(plain, sizes="d", reports_truncated=False, size_option="gpus"),
    )

    with pytest.raises(ConfigError) as caught:
        load_config(
            "grpo", [*server, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.tensor_model_parallel_size=2"]
        )

    devices, sampled = (str(problem) for problem in caught.value.problems)
    assert f"{ROLLOUT}.engine_kwargs.vllm.gpus=2" in devices
    assert f"{ROLLOUT}.top_p" in sampled and "'vllm' does not report log-probs" in sampled


def test_what_needs_whole_weights_is_refused_where_they_are_spread():
    config = load_config("ppo", [*GOOD, f"{ACTOR}.optim.optimizer=adamw_8bit"]).config
    actor = replace(config.actor_rollout_ref.actor, strategy="fsdp")
    trainer = replace(config.trainer, launcher="ray")
    spread = replace(
        config, trainer=trainer, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor)
    )
    with pytest.raises(ConfigError) as caught:
        check(spread)
    keys = [problem.places[1][0].split(" = ")[0] for problem in caught.value.problems]
    assert keys == [f"{ACTOR}.optim.optimizer"]
