"""Defaults that cannot work become smaller, and say so; what somebody chose is refused with its
fix."""

from itertools import combinations

import pytest

from distflow.config import (
    Config,
    ConfigError,
    Loaded,
    RunLimits,
    fit_to,
    flatten,
    load_config,
    to_yaml,
)
from distflow.config.compose.fit_defaults_to_data import fit
from distflow.config.compose.setting_origins import COMMAND_LINE, preset_names
from distflow.config.keys.schema import with_values
from distflow.config.rules.check_config import find_problems, find_size_problems

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
GOOD = ("data.train_files=train.jsonl", f"{MODEL}.path=model")
BATCH = "data.train_batch_size"
MINI = f"{ACTOR}.ppo_mini_batch_size"
WARM_UP = f"{ACTOR}.optim.lr_warmup_steps"
PROMPT = "data.max_prompt_length"
RESPONSE = "data.max_response_length"
ZONE = "reward.overlong.buffer_tokens"

ENGINE = "actor_rollout_ref.rollout.name"
CANNOT = "the embedded engine cannot run this model: family 'gemma2' is not supported"


def load(preset: str, *overrides: str) -> Loaded:
    return load_config(preset, [*GOOD, *overrides])


def fitted(loaded: Loaded) -> dict[str, object]:
    values = flatten(loaded.config)
    return {change.key: values[change.key] for change in loaded.fitted}


# preset, overrides, rows, context: what they become, by hand
FITS = [
    ("grpo", [], 30, None, {BATCH: 30, MINI: 30}),
    ("grpo", [], 300, None, {BATCH: 300}),
    ("grpo", [], 513, None, {}),
    ("grpo", [f"{BATCH}=16"], 30, None, {MINI: 16}),
    ("sft", [], 30, None, {BATCH: 30, MINI: 30}),
    ("grpo", ["data.train_max_samples=20"], 20, None, {BATCH: 20, MINI: 20}),
    ("grpo", [], None, 6144, {}),
    ("grpo", [], None, 512, {PROMPT: 170, RESPONSE: 342}),
    ("grpo", [f"{RESPONSE}=100"], None, 512, {PROMPT: 412}),
    ("grpo", [f"{PROMPT}=100"], None, 512, {RESPONSE: 412}),
    ("dapo", [f"{RESPONSE}=1024"], None, None, {ZONE: 256}),
    ("dapo", [], None, 1536, {PROMPT: 512, RESPONSE: 1024, ZONE: 256}),
    ("sft", [], None, 512, {PROMPT: 170, RESPONSE: 342}),
    ("dapo", [f"{RESPONSE}=1"], None, None, {ZONE: 0}),
]


@pytest.mark.parametrize(("preset", "overrides", "rows", "context", "becomes"), FITS)
def test_what_nobody_chose_becomes_what_fits(preset, overrides, rows, context, becomes):
    loaded = fit_to(load(preset, *overrides), RunLimits(rows, context))
    assert fitted(loaded) == becomes
    assert all(
        f"{key.rpartition('.')[2]}: {value}\n" in to_yaml(loaded.config)
        for key, value in becomes.items()
    )


@pytest.mark.parametrize(("preset", "engine"), [("grpo", "hf"), ("ppo", "hf"), ("sft", "embedded")])
def test_a_model_that_the_default_engine_cannot_run_has_the_engine_for_any_model(preset, engine):
    """Fine-tuning generates nothing."""
    loaded = fit_to(load(preset), RunLimits(not_embedded="family 'gemma2' is not supported"))
    assert loaded.config.actor_rollout_ref.rollout.name == engine
    said = [str(change) for change in loaded.fitted if change.key == ENGINE]
    assert said == ([f"{ENGINE}='hf' instead of 'embedded': {CANNOT}"] if engine == "hf" else [])


CHOSEN = [
    (
        [f"{ENGINE}=embedded"],
        RunLimits(not_embedded="family 'gemma2' is not supported"),
        "set it to hf",
    ),
    (["data.train_batch_size=64"], RunLimits(rows=30), "data.train_batch_size=30 or less"),
    ([f"{MINI}=64"], RunLimits(rows=30), f"{MINI}=30 or less"),
    ([f"{PROMPT}=512", f"{RESPONSE}=512"], RunLimits(context=1000), f"{RESPONSE}=488 or less"),
    ([f"{PROMPT}=900", f"{RESPONSE}=200"], RunLimits(context=1000), f"{PROMPT}=800 or less"),
    ([f"{RESPONSE}=1000"], RunLimits(context=1000), "1000 together or less"),
    (
        [f"{WARM_UP}=40", "trainer.total_epochs=2", f"{BATCH}=10", f"{MINI}=10"],
        RunLimits(rows=100),
        "less than 20, e.g. 2",
    ),
]


@pytest.mark.parametrize(("overrides", "room", "advice"), CHOSEN)
def test_what_somebody_chose_is_refused_with_its_fix(overrides, room, advice):
    loaded = load("grpo", *overrides)
    with pytest.raises(ConfigError) as refused:
        fit_to(loaded, room)
    assert advice in str(refused.value) and "(command line)" in str(refused.value)


def test_a_file_of_the_users_chooses_and_a_preset_of_ours_does_not(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [sft, _self_]\ndata: {train_batch_size: 64}\n")
    assert fitted(fit_to(load("sft"), RunLimits(rows=5)))[BATCH] == 5

    with pytest.raises(ConfigError, match="a batch of 64 .* 5 rows"):
        fit_to(load(str(file)), RunLimits(rows=5))


def test_a_warm_up_of_a_file_that_is_built_on_is_the_users(tmp_path):
    (tmp_path / "base.yaml").write_text(f"defaults: [grpo, _self_]\n{ACTOR.replace('.', ': {')}: "
                                        "{optim: {lr_warmup_steps: 50}}}\n")  # fmt: skip
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base, _self_]\ntrainer: {total_training_steps: 5}\n"
    )
    with pytest.raises(ConfigError, match=" 50 of 10 optimizer steps"):
        load(str(tmp_path / "mine.yaml"))


def test_a_size_of_a_file_yields_to_one_on_the_command_line(tmp_path):
    """A smoke test of a real config: few steps, a small batch."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [grpo, _self_]\ndata: {train_batch_size: 64}\n"
        "reward: {overlong: {buffer_tokens: 512}}\n"
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: 32, optim: {lr_warmup_steps: 5}}}\n"
    )
    lines = {
        "trainer.total_training_steps=2": {WARM_UP: 0},
        f"{BATCH}=8": {MINI: 8},
        f"{RESPONSE}=100": {ZONE: 25},
    }
    for line, becomes in lines.items():
        assert fitted(load(str(file), line)) == becomes
    assert fitted(load(str(file), "data.train_max_samples=6")) == {BATCH: 6, MINI: 6}
    with pytest.raises(ConfigError, match=" 5 of 2 optimizer steps"):
        load(str(file), f"{WARM_UP}=5", f"{BATCH}=32", "trainer.total_training_steps=2")


@pytest.mark.slow
def test_no_default_is_refused_for_a_size_that_somebody_chose():
    """Any two sizes on any preset: what is refused names a key of theirs."""
    sizes = {
        BATCH: 6,
        MINI: 5,
        RESPONSE: 1,
        "trainer.total_training_steps": 1,
        "trainer.critic_warmup": 3,
        "critic.ppo_mini_batch_size": 7,
        "data.train_max_samples": 2,
        WARM_UP: 4,
        ZONE: 9,
        # fmt: skip
        "trainer.total_epochs": 1,
        "actor_rollout_ref.rollout.n": 2,
        "async.max_staleness": 1,
    }
    data = {"data.train_files": ("t.jsonl",), f"{MODEL}.path": "m"}

    for preset in preset_names():
        base = load_config(preset, complete=False)
        for chosen in combinations(sizes, 2):
            origins = {**base.origins, **dict.fromkeys(chosen, COMMAND_LINE)}
            given = {key: sizes[key] for key in chosen} | (
                data if not base.config.data.domains else {}
            )
            config = fit(with_values(base.config, given), origins, RunLimits())[0]
            problems = find_problems(config, origins, set(), complete=False)
            problems = problems or find_size_problems(fit(config, origins, ROOM)[0], origins, ROOM)
            for problem in problems:
                assert COMMAND_LINE in dict(problem.places).values(), (preset, chosen, str(problem))


ROOM = RunLimits(rows=10, context=40)


def test_the_same_room_gives_the_same_config_and_loading_it_again_changes_nothing(tmp_path):
    once = fit_to(load("dapo"), RunLimits(30, 512))
    assert fit_to(once, RunLimits(30, 512)) is once
    file = tmp_path / "resolved.yaml"
    file.write_text(to_yaml(once.config))
    again = load_config(str(file))
    assert again.config == once.config and fit_to(again, RunLimits(30, 512)) is again


def rewards(*overrides: str, preset: str = "grpo") -> dict[str, list[str]]:
    config: Config = load(preset, "custom_reward_function.path=r.py", *overrides).config
    return {
        domain: [part.name for part in parts] for domain, parts in config.reward.functions.items()
    }


def test_a_reward_file_judges_the_domains_that_name_no_other():
    assert rewards() == {"default": ["custom"]}
    assert rewards("reward.functions={sums: [math]}") == {"sums": ["math"], "default": ["custom"]}
    assert rewards("reward.functions={sums: [custom]}") == {"sums": ["custom"]}
    assert rewards(preset="quickstart_grpo") == {"default": ["custom"]}
    assert rewards(preset="sft") == {"default": ["math"]}
