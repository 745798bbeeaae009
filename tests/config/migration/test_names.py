"""Names of other systems: the tables speak of keys that exist, and every well-known name is
answered."""

import re
from pathlib import Path

import pytest
import yaml

from distflow.config import ConfigError, load_config
from distflow.config.compose.setting_origins import Setting
from distflow.config.compose.typed_values import check_bounds, convert
from distflow.config.compose.unknown_keys import is_known, judge_settings, suggest
from distflow.config.keys.schema import group_names, schema_keys
from distflow.config.migration.tables import ANY, NOT_GIVEN, all_tables, find_names

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


OPTIM = f"{ACTOR}.optim"


ENTRIES = [
    (key, name)
    for table in all_tables().values()
    for key, name in (*table.names.items(), *table.tuning.items())
]


def refuse(*overrides):
    """Problems by key of overrides of the preset grpo, without a model or data."""
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", list(overrides), complete=False)
    return {problem.places[0][0]: problem for problem in caught.value.problems}


def written(text):
    return [tuple(override.split("=", 1)) for override in text.split(" ")] if text else []


def test_what_is_to_be_written_are_our_keys_and_values_that_they_take():
    for key, name in ENTRIES:
        for value in (NOT_GIVEN, *name.values):
            for ours, given in written(name.overrides(value)):
                assert is_known(ours), f"{key}: {ours}"
                info = schema_keys().get(ours)
                if info is None or "..." in given:
                    continue

                plain = yaml.safe_load(given)
                made = (
                    info.spec.parse(plain) if info.spec.parse else convert(plain, info.annotation)
                )
                assert not list(check_bounds(made, info)), f"{key}: {ours}={given}"


def test_keys_that_a_note_names_exist():
    for key, name in ENTRIES:
        for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", name.note):
            ours = word.partition(".")[0] in group_names() and not word.endswith(".md")
            assert not ours or is_known(word), f"{key}: {word}"


def judge(key, value):
    """What `distflow config` says of one setting: the problems, and the line where it accepts
    it."""
    problems, accepted = judge_settings(
        [Setting(key, "command line", is_group=False, value=value)], {}
    )
    return [problem.advice for problem in problems], accepted.get(key, "")


def test_every_key_is_accepted_with_a_line_where_it_changes_nothing_and_else_answered():
    """Of several systems, all must say so."""
    found = {key.replace("*", "x") for table in all_tables().values() for key in table.names}
    keys = sorted(key for key in found if not is_known(key))
    assert len(keys) > 900

    for key in keys:
        names = find_names(key).values()
        values = {
            repr(value): value for name in names for value in name.harmless if name.harmless != ANY
        }
        for value in (*values.values(), "no value of any system"):
            advice, line = judge(key, value)
            if all(name.accepts(value) for name in names):
                assert not advice and line.startswith(f"{key}="), (key, value)
            else:
                assert len(advice) == 1 and len(advice[0]) > 10 and not line, (key, value)


def test_no_pattern_is_hidden_by_one_before_it():
    for table in all_tables().values():
        for key, name in table.names.items():
            assert table.find(key.replace("*", "x")) == name, key


def test_a_value_that_has_no_name_here_is_answered_with_those_that_have():
    said = find_names("loss_type")["TRL"].answer("dft")
    assert (
        "dft" not in said
        and f"`dr_grpo` is `{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm`" in said
    )
    answer = find_names("save_strategy")["TRL"].answer("hour")
    assert answer.startswith(
        "trainer.save_freq is in steps, trainer.save_freq_epochs in epochs; `no` is"
    )


def test_none_of_them_is_a_key_here():
    names = {key for table in all_tables().values() for key in table.names}
    assert not names & set(schema_keys())


SYSTEM_DEFAULTS = [
    (table, *part) for table in all_tables().values() for part in table.defaults.items()
]


def test_the_defaults_of_other_systems_have_keys_here():
    for table, method, defaults in SYSTEM_DEFAULTS:
        formulas = " ".join(
            formula for part in table.computed.values() for formula in part.values()
        )
        for key in defaults:
            assert is_known(key) or table.find(key, method) or key in formulas, key


def test_formulas_compute_keys_that_exist():
    for table in all_tables().values():
        for formulas in table.computed.values():
            assert all(is_known(ours) for ours in formulas if "." in ours), formulas


NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
TRL = NAMES["TRL"]
OTHERS = NAMES["others"]


@pytest.mark.parametrize("settings", [TRL, OTHERS], ids=["TRL", "others"])
def test_well_known_names_are_answered_with_ours_and_their_value(settings):
    """Empty: it asks for nothing that is not so anyway, and is accepted with a line."""
    said = {override: suggest_for(override) for override in settings}
    for override, part in settings.items():
        if part:
            assert part in said[override], override

    accepted = [override for override, part in settings.items() if not part]
    notes = load_config("grpo", accepted, complete=False).notes
    assert len([line for line in notes if "verl has other defaults" not in line]) == len(accepted)


def suggest_for(override):
    key, value = override.split("=", 1)
    return suggest(
        key, schema_keys(), yaml.load(value, yaml.SafeLoader) if "e-" not in value else float(value)
    )


def test_the_command_line_gives_the_same_answers():
    some = [
        "top_k=0",
        "+beta=0.04",
        "++scale_rewards=False",
        "report_to=none",
    ]
    problems = refuse(*some)
    assert [problem.what for problem in problems.values()] == [
        "there is no such key; TRL has it"
    ] * 4

    for override in some:
        key = override.lstrip("+").partition("=")[0]
        assert TRL[override.lstrip("+")] in problems[key].advice


def test_a_file_gives_the_same_answers(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "defaults: [grpo, _self_]\nnum_generations: 4\ngconfig:\n  n_samples: 4\n  greedy: false\n"
        "actor_rollout_ref:\n  actor:\n    fsdp_config: {param_offload: false, model_dtype: fp32}\n"
        "    ppo_micro_batch_size_per_gpu: 4\n"
        "critic:\n  model:\n    fsdp_config: {param_offload: true, optimizer_offload: false}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "run.yaml"), complete=False)
    said = {problem.places[0][0]: problem.advice for problem in caught.value.problems}
    assert said == {
        "num_generations": f"write {ROLLOUT}.n=4",
        "gconfig.n_samples": f"write {ROLLOUT}.n=4",
        "critic.model.fsdp_config.param_offload": "write critic.fsdp_config.param_offload=true",
    }


def test_a_group_of_one_system_and_a_name_of_another_are_told_apart(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "defaults: [grpo, _self_]\ntrain_dataset:\n  path: gsm8k\n"
        "  batch_size: ${gconfig.n_samples}\n"
        "gconfig: {n_samples: 4}\ntokenizer_path: ${train_dataset.path}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "run.yaml"), complete=False)
    said = {problem.places[0][0]: problem.advice for problem in caught.value.problems}
    assert said == {
        "train_dataset.path": "write data.train_files=gsm8k",
        "train_dataset.batch_size": "write data.train_batch_size=4; in prompts",
        "gconfig.n_samples": f"write {ROLLOUT}.n=4",
        "tokenizer_path": f"write {MODEL}.tokenizer_path=gsm8k",
    }


@pytest.mark.parametrize("value", ["true", "1", "false"])
def test_an_offload_is_accepted_only_where_nothing_is_to_be_offloaded(value):
    override = f"critic.model.fsdp_config.optimizer_offload={value}"
    if value == "false":
        (line,) = list(load_config("verl_grpo", [override], complete=False).notes)
        assert line == f"{override} (verl): it asks for nothing"
    else:
        assert list(refuse(override)) == ["critic.model.fsdp_config.optimizer_offload"]


def test_what_is_accepted_leaves_no_trace_in_the_config():
    plain = load_config("verl_grpo", complete=False)
    spoken = load_config(
        "verl_grpo", ["trainer.balance_batch=True", f"{ACTOR}.entropy_coeff=0"], complete=False
    )
    assert (spoken.config, spoken.origins) == (plain.config, plain.origins)
    assert spoken.notes[1] == (
        f"{ACTOR}.entropy_coeff=0 (verl): here it is {ACTOR}.entropy_coef=0, which is already set"
    )
    assert f"{ACTOR}.entropy_coeff" in refuse(f"{ACTOR}.entropy_coeff=0.01")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{ACTOR}.kl_loss_type=k3", "did you mean low_var_kl?"),
        ("algorithm.kl_penalty=k2", "did you mean mse?"),
        (f"{OPTIM}.scheduler=cosine", "did you mean cosine_with_warmup?"),
        (f"{OPTIM}.optimizer=AdamW", "did you mean adamw?"),
        ("trainer.resume_mode=disable", "never (verl's disable)"),
    ],
)
def test_values_of_verl_are_answered(override, said):
    (problem,) = refuse(override).values()
    assert said in problem.advice


# What must not be suggested for what
DANGEROUS = [
    ("max_completion_length", "max_prompt_length"),
    ("max_new_length", "max_prompt_length"),
    ("data.max_completion_length", "max_prompt_length"),
    ("data.max_answer_length", "max_prompt_length"),
    ("data.train_files_size", "train_files"),
    ("data.test_files", "train_files"),
    ("trainer.eval_freq", "save_freq"),
    ("trainer.total_steps", "total_epochs"),
    (f"{ROLLOUT}.top_n", "top_p"),
    (f"{ACTOR}.clip_high", "clip_ratio_high"),
    (f"{ACTOR}.min_grad_norm", "max_grad_norm"),
    ("data.prompt_id", "prompt_key"),
    ("logging.path", "model.path"),
    ("log.level", "reward_norm.mean_level"),
    ("wandb.name", "rollout.name"),
    ("server.mode", "actor.weight_update_mode"),
]


@pytest.mark.parametrize(("key", "wrong"), DANGEROUS)
def test_another_word_is_no_suggestion(key, wrong):
    assert wrong not in suggest(key, schema_keys())


MISSPELT = {
    "data.train_batch_sise": "data.train_batch_size",
    "data.trian_files": "data.train_files",
    "data.trainbatchsize": "data.train_batch_size",
    "trainer.sede": "trainer.seed",
    "Trainer.Seed": "trainer.seed",
    "algoritm.gama": "algorithm.gamma",
    "actor.cliprange_ratio": "",
    f"{ACTOR}.clip_ration": f"{ACTOR}.clip_ratio",
    "temprature": f"{ROLLOUT}.temperature",
    "tempreature": f"{ROLLOUT}.temperature",
    "trainer.lr": f"{OPTIM}.lr",
    "rollout.n": f"{ROLLOUT}.n",
    "zzz": "",
    "data.zzz": "",
}


@pytest.mark.parametrize("key", MISSPELT)
def test_a_typing_error_is_understood(key):
    said = suggest(key, schema_keys())
    wanted = f"did you mean {MISSPELT[key]}" if MISSPELT[key] else "see docs/config.md"
    assert said.startswith(wanted)
