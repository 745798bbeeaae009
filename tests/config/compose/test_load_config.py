"""Loading: composition of presets, files and overrides, and what is known of where each key was
set."""

from pathlib import Path

import pytest

from distflow.config import ConfigError, load_config, preset_names, to_yaml
from distflow.config.compose.load_config import config_of_run
from distflow.config.keys.reward import RewardPart

GOOD = ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=model"]
BASE = "data: {train_files: train.jsonl}\nactor_rollout_ref: {model: {path: model}}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the current folder and gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.yaml"):
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def problems_of(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)
    return caught.value.problems


def test_a_base_in_a_folder_below_has_its_keys_in_a_group_of_that_name(write):
    Path("sub").mkdir()
    write("trainer: {seed: 5}\n", "sub/base.yaml")
    (problem,) = problems_of(write("defaults: [sub/base, _self_]\n" + BASE))
    assert problem.places == (("sub.trainer", "sub/base.yaml:1"),)


def test_the_folder_of_a_run_may_be_in_ones_home(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, run_dir in (
        ("~/runs/x", "/home/somebody/runs/x"),
        ("~nobody-at-all/x", "~nobody-at-all/x"),
        ("x", "x"),
    ):
        config = load_config("grpo", [f"trainer.default_local_dir={given}"], complete=False).config
        assert config.trainer.run_dir == Path(run_dir)


def test_later_layers_win_and_each_key_knows_who_set_it(write):
    file = write("defaults: [dapo, _self_]\n" + BASE + "algorithm:\n  gamma: 0.9\n  lam: 0.8\n")
    loaded = load_config(file, ["algorithm.lam=0.7"])
    actor = loaded.config.actor_rollout_ref.actor
    algorithm = loaded.config.algorithm
    assert (algorithm.gamma, algorithm.lam, algorithm.filter_groups.enable) == (0.9, 0.7, True)
    assert (actor.clip_ratio_high, actor.use_kl_loss) == (0.28, False)
    assert loaded.origin("algorithm.gamma") == "run.yaml:5"
    assert loaded.origin("algorithm.lam") == "command line"
    assert loaded.origin("actor_rollout_ref.actor.clip_ratio_high").startswith("methods/dapo.py:")
    assert loaded.origin("actor_rollout_ref.actor.entropy_coef").startswith("methods/grpo.py:")
    assert loaded.origin("trainer.seed") == "default"


def test_a_file_comes_after_what_it_builds_on_even_without_self(write):
    file = write("defaults: [grpo]\n" + BASE + "trainer: {experiment_name: mine}\n")
    assert load_config(file).config.trainer.experiment_name == "mine"


def test_a_file_builds_on_its_neighbour(write):
    write("defaults: [grpo, _self_]\ntrainer: {seed: 5}\n", "team.yaml")
    loaded = load_config(write("defaults: [team, _self_]\n" + BASE))
    assert loaded.config.trainer.seed == 5
    assert loaded.origin("trainer.seed") == "team.yaml:2"
    assert loaded.config.dag.pipeline == "grpo"


UNNAMED = {
    "nothing": ("", [], "grpo", "sft"),
    "a pipeline of the package": ("dag: {pipeline: ppo}\n", [], "ppo", "ppo"),
    "an estimator with a critic": (
        "algorithm: {adv_estimator: gae}\n",
        ["algorithm.adv_estimator=gae"],
        "ppo",
        "ppo",
    ),
    "a pipeline of the user's": (
        "dag: {pipeline: 'm.py:f'}\n",
        ["dag.pipeline=m.py:f"],
        "grpo",
        "sft",
    ),
    "a neighbour that names none either": (
        "defaults: [team, _self_]\n",
        ["trainer.seed=5"],
        "grpo",
        "sft",
    ),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_a_file_that_names_no_preset_builds_on_that_of_its_pipeline_or_of_the_command(write, name):
    text, overrides, base, of_sft = UNNAMED[name]
    write("trainer: {seed: 5}\n", "team.yaml")
    file = write(text + BASE)
    for loaded, expected in ((load_config(file), base), (load_config(file, base="sft"), of_sft)):
        assert loaded.config == load_config(expected, GOOD + overrides).config
        assert loaded.notes == (f"run.yaml has no defaults: it builds on {expected}",)


def test_a_key_that_the_command_removes_chooses_no_preset(write):
    file = write("algorithm: {adv_estimator: gae}\n" + BASE)
    assert load_config(file, ["~algorithm.adv_estimator"]).config.dag.pipeline == "grpo"


def test_a_whole_config_takes_nothing_from_a_preset(write):
    whole = load_config(
        write("defaults: [rlvr, _self_]\n" + BASE), ["reward.functions={default: [format]}"]
    )
    again = load_config(write(to_yaml(whole.config), "config.yaml"))
    assert again.config == whole.config and not any(
        "has no defaults" in note for note in again.notes
    )


def test_a_file_with_the_name_of_the_preset_beside_it_is_no_base(write):
    write("trainer: {seed: 5}\n", "grpo.yaml")
    for name in ("run.yaml", "grpo.yaml"):
        (problem,) = problems_of(write(BASE, name))
        assert "grpo.yaml next to it" in problem.what and "name the intended base" in problem.advice


@pytest.mark.parametrize("form", ["trainer.seed=7", "+trainer.seed=7", "++trainer.seed=7"])
def test_the_forms_of_an_override_mean_the_same(form):
    assert load_config("grpo", [*GOOD, form]).config.trainer.seed == 7


def test_a_removed_key_has_its_default_again():
    loaded = load_config(
        "dapo", [*GOOD, "~actor_rollout_ref.actor.clip_ratio_high", "~algorithm.filter_groups"]
    )
    assert loaded.config.actor_rollout_ref.actor.clip_ratio_high is None
    assert not loaded.config.algorithm.filter_groups.enable
    assert loaded.origin("algorithm.filter_groups.enable") == "default"


def test_a_group_can_be_set_as_a_mapping():
    loaded = load_config("grpo", [*GOOD, "actor_rollout_ref.rollout={n: 4, val_kwargs: {n: 2}}"])
    rollout = loaded.config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.val_kwargs.n, rollout.temperature) == (4, 2, 1.0)
    assert loaded.set_keys["actor_rollout_ref.rollout.val_kwargs.n"] == "command line"


def test_values_are_read_as_people_mean_them(write):
    file = write(BASE + "actor_rollout_ref.x: 1\n".replace("actor_rollout_ref.x: 1\n", ""))
    overrides = [
        "actor_rollout_ref.actor.optim.lr=3e-6",
        "data.train_batch_size=1e3",
        "algorithm.gamma=1",
        "data.val_files=val.jsonl",
        "trainer.logger=[console,wandb]",
        "trainer.total_training_steps=null",
        "data.prompt_template='Question: {prompt}, answer:'",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
        "actor_rollout_ref.model.lora_rank=4",
    ]
    config = load_config(file, overrides).config
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config.data.train_batch_size == 1000 and type(config.data.train_batch_size) is int
    assert type(config.algorithm.gamma) is float
    assert config.data.train_files == ("train.jsonl",) and config.data.val_files == ("val.jsonl",)
    assert config.trainer.logger == ("console", "wandb")
    assert config.data.prompt_template == "Question: {prompt}, answer:"
    assert config.actor_rollout_ref.model.target_modules == ("q_proj", "v_proj")


def test_an_exponent_that_yaml_reads_as_a_text_is_a_number(write):
    file = write(BASE + "algorithm: {adv_epsilon: '1e-4'}\ncritic: {optim: {lr: 2E-5}}\n")
    config = load_config(file).config
    assert (config.algorithm.adv_epsilon, config.critic.optim.lr) == (1e-4, 2e-5)


def test_one_key_may_refer_to_another_defaults_included(write):
    file = write(
        BASE
        + (
            "trainer:\n  seed: ${data.seed}\n  project_name: "
            "seed-${trainer.seed}-${data.prompt_key}\n"
        )
    )
    config = load_config(file, ["data.seed=9"]).config
    assert (config.trainer.seed, config.trainer.project_name) == (9, "seed-9-prompt")


def test_reward_functions_replace_the_default_and_add_up(write):
    file = write(BASE + "reward:\n  functions:\n    gsm8k: [{name: math, weight: 2}, format]\n")
    config = load_config(file, ["reward.functions.svamp=exact_match"]).config
    assert config.reward.functions == {
        "gsm8k": (RewardPart("math", 2.0), RewardPart("format")),
        "svamp": (RewardPart("exact_match"),),
    }


def test_names_of_the_users_own_are_left_to_the_registry_where_modules_are_named():
    overrides = [
        "trainer.imports=my_code",
        "algorithm.adv_estimator=mine",
        "reward.functions.default=[mine]",
    ]
    config = load_config("grpo", [*GOOD, *overrides, "actor_rollout_ref.rollout.n=1"]).config
    assert config.algorithm.adv_estimator == "mine" and config.trainer.imports == ("my_code",)


@pytest.mark.parametrize(
    ("overrides", "bound_pipeline"),
    [
        ([], "grpo"),
        (["algorithm.adv_estimator=gae"], "ppo"),
        (["algorithm.workflow_type=DAPO"], "dapo"),
        (["dag.pipeline=sft"], "sft"),
        (["dag.pipeline=dapo", "algorithm.workflow_type=DAPO"], "dapo"),
        (["dag.pipeline=mine:build"], "custom"),
        (["dag.pipeline=mine.py:build", "algorithm.workflow_type=DEFAULT"], "custom"),
        (["dag.pipeline=[{id: a, func: 'm:f'}]"], "custom"),
    ],
)
def test_what_selects_the_program(write, overrides, bound_pipeline):
    from distflow.config import pipeline_name

    assert pipeline_name(load_config(write(BASE), overrides).config) == bound_pipeline


def test_workflow_type_dapo_contradicts_gae_even_without_a_pipeline(write):
    (problem,) = problems_of(
        write(BASE), ["algorithm.workflow_type=DAPO", "algorithm.adv_estimator=gae"]
    )
    assert [subject for subject, _ in problem.places] == [
        "algorithm.adv_estimator = 'gae'",
        "dag.pipeline = 'dapo'",
    ]


def test_remote_code_runs_from_a_folder_or_a_pinned_revision(tmp_path):
    trust = "actor_rollout_ref.model.trust_remote_code=true"
    path = "actor_rollout_ref.model.path"
    revision = "actor_rollout_ref.model.revision"
    assert load_config("grpo", [*GOOD, trust, f"{path}='{tmp_path}'"])
    assert load_config("grpo", [*GOOD, trust, f"{path}=org/name", f"{revision}=9f8e7d6c5b"])

    # it comes with no code of others
    assert load_config("grpo", [*GOOD, trust, f"{path}=builtin:tiny-arithmetic"])


# Broken files: (text, place, what is said)
BROKEN = {
    "an unknown key": (
        BASE + "trainer:\n  sede: 1\n",
        ("trainer.sede", "run.yaml:4"),
        "did you mean trainer.seed?",
    ),
    "an unknown group": (BASE + "trainr:\n  seed: 1\n", ("trainr", "run.yaml:3"), "no such key"),
    "a wrong type": (BASE + "trainer:\n\n  seed: one\n", ("trainer.seed", "run.yaml:5"), "'one'"),
    "no value": (
        BASE + "trainer: {seed: null}\n",
        ("trainer.seed", "run.yaml:3"),
        "remove the key to use its default",
    ),
    "a quoted number": (
        BASE + "trainer: {seed: '1'}\n",
        ("trainer.seed", "run.yaml:3"),
        "without quotes",
    ),
    "a value for a group": (BASE + "trainer: 5\n", ("trainer", "run.yaml:3"), "group of keys"),
    "an empty group": (BASE + "trainer:\n", ("trainer", "run.yaml:3"), "group of keys"),
    "a list for a group": (BASE + "trainer: [1]\n", ("trainer", "run.yaml:3"), "group of keys"),
    "a key twice": (
        BASE + "trainer:\n  seed: 1\n  seed: 2\n",
        ("trainer.seed", "run.yaml:5"),
        "line 4",
    ),
    "a key with dots": (
        BASE + "trainer.seed: 1\n",
        ("trainer.seed", "run.yaml:3"),
        "trainer: {seed: ...}",
    ),
    "no YAML": (BASE + "trainer: {seed: 1\n", ("run.yaml", "line 4, column 1"), "not valid YAML"),
    "a tab": (BASE + "trainer:\n\tseed: 1\n", ("run.yaml", "line 4, column 1"), "not valid YAML"),
    "a list": ("- data\n", ("run.yaml", "line 1"), "not a mapping"),
    "an object tag": (
        BASE + "trainer: {seed: !!python/name:os.system }\n",
        ("run.yaml", "line 3, column 17"),
        "not valid YAML",
    ),
    "an unknown base": (
        "defaults: [gropo]\n" + BASE,
        ("run.yaml", "defaults"),
        "dro, embodied_srpo",
    ),
    "itself as base": ("defaults: [run]\n" + BASE, ("run.yaml", "defaults"), "builds on itself"),
    "a section of hydra": (
        BASE + "hydra: {run: {dir: x}}\n",
        ("hydra", "run.yaml:3"),
        "default_local_dir",
    ),
    "an unset variable": (
        BASE + "trainer: {project_name: '${oc.env:NO_SUCH}'}\n",
        ("trainer.project_name", "run.yaml:3"),
        "${oc.env:NAME,value}",
    ),
    "an unknown reference": (
        BASE + "trainer: {seed: '${data.sed}'}\n",
        ("trainer.seed", "run.yaml:3"),
        "data.sed",
    ),
    "a replaced key": (
        BASE + "trainer: {max_actor_ckpt_to_keep: 3}\n",
        ("trainer.max_actor_ckpt_to_keep", "run.yaml:3"),
        "trainer.keep_last",
    ),
    "a nested replaced key": (
        BASE + "reward_model:\n  overlong_buffer:\n    len: 3\n",
        ("reward_model.overlong_buffer.len", "run.yaml:5"),
        "reward.overlong.buffer_tokens",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_line(write, name):
    text, place, said = BROKEN[name]
    problems = problems_of(write(text))
    assert len(problems) == 1, "\n".join(str(problem) for problem in problems)
    assert problems[0].places[0] == place
    assert said in str(problems[0])


def test_a_broken_neighbour_is_named(write):
    write("trainer: {seed: 1\n", "team.yaml")
    (problem,) = problems_of(write("defaults: [team, _self_]\n" + BASE))
    assert "team.yaml" in str(problem)


def test_files_that_build_on_each_other_are_refused(write):
    write("defaults: [run, _self_]\n", "team.yaml")
    (problem,) = problems_of(write("defaults: [team, _self_]\n" + BASE))
    assert "builds on itself" in problem.what


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gropo", "did you mean grpo?"),
        ("missing.yaml", "neither a preset nor a file"),
    ],
)
def test_an_unknown_preset_or_file_is_named(name, said):
    (problem,) = problems_of(name)
    assert said in str(problem)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "it has no weights"),
        ({"model.safetensors": POINTER}, "model.safetensors is a pointer of git-lfs"),
        ({"model.safetensors.index.json": "[]", "model.safetensors": ""}, ""),
    ],
)
def test_a_model_folder_without_all_its_weights_is_told_before_anything_is_read(
    tmp_path, files, said
):
    for name, text in {"config.json": "{}", "rows.jsonl": "", **files}.items():
        (tmp_path / name).write_text(text)
    key = "actor_rollout_ref.model.path"
    data = f"data.train_files={tmp_path}/rows.jsonl"
    lines = [data, f"{key}={tmp_path}"]
    if not said:
        assert load_config("grpo", lines, needed={key})
        return

    with pytest.raises(ConfigError, match=said):
        load_config("grpo", lines, needed={key})
    assert load_config("grpo", [*lines, "actor_rollout_ref.model.init=random"], needed={key})


def test_data_that_git_has_not_downloaded(tmp_path):
    (tmp_path / "rows.parquet").write_text(POINTER)
    with pytest.raises(ConfigError, match=r"rows\.parquet .*git-lfs.*\n.*git lfs pull"):
        load_config(
            "grpo", [f"data.train_files={tmp_path}/rows.parquet"], needed={"data.train_files"}
        )


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "config.yaml").write_text(BASE)
    (problem,) = problems_of(str(tmp_path))
    assert f"did you mean {tmp_path / 'config.yaml'}" in str(problem)


def test_a_guess_at_another_systems_key_starts_as_the_key_does():
    """`version` is as close to TRL's `epsilon` as a typo would be."""
    problem = problems_of("grpo", ["version=99"])[0]
    assert "did you mean" not in str(problem) and "docs/config.md" in str(problem)


def test_a_file_that_is_no_yaml_file(write):
    (problem,) = problems_of(write(BASE, "run.yml"))
    assert "name a .yaml file" in str(problem)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads(preset):
    loaded = load_config(preset, complete=False)
    given = [] if loaded.config.data.domains else [*GOOD, "data.val_files=val.jsonl"]
    if preset == "distill":
        given.append("distill.teacher.path=teacher")
    assert load_config(preset, given)


@pytest.mark.parametrize("preset", ["grpo", "ppo", "dapo", "sft"])
def test_presets_of_algorithms_need_only_data_and_a_model(preset):
    loaded = load_config(preset, GOOD)
    assert loaded.config.dag.pipeline == preset
    assert loaded.config.trainer.experiment_name == f"{preset}_training"


def test_dapo_is_what_its_paper_says():
    config = load_config("dapo", GOOD).config
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (
        0.2,
        0.28,
        "token-mean",
    )
    assert config.algorithm.filter_groups.enable and config.reward.overlong.buffer_tokens > 0
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward


@pytest.mark.parametrize(("preset", "sync"), [("async_grpo", "grpo"), ("async_ppo", "ppo")])
def test_asynchronous_presets_run_the_synchronous_programs_as_areal_does(preset, sync):
    config = load_config(preset, GOOD).config
    actor = config.actor_rollout_ref.actor
    assert (config.dag.pipeline, config.async_.max_staleness) == (sync, 4)
    assert actor.policy_loss == "decoupled"
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward
    assert config.algorithm.adv_estimator == load_config(sync, GOOD).config.algorithm.adv_estimator


def test_a_group_at_another_level_is_named_with_its_place(write):
    problem = problems_of(write(BASE + "actor: {optim: {lr: 1e-5}}\n"))[0]
    assert (
        problem.places[0][0] == "actor"
        and "did you mean actor_rollout_ref.actor?" in problem.advice
    )
    (problem,) = problems_of(write(BASE.replace("{model", "{optim: {lr: 1e-5}, model")))
    assert "actor_rollout_ref.actor.optim" in problem.advice


def test_a_word_that_yaml_reads_as_a_truth_value_is_named(write):
    (problem,) = problems_of(write(BASE + "trainer: {resume_mode: off}\n"))
    assert (
        "put the word in quotes: YAML reads on, yes, off and no as true and false" in problem.advice
    )


def test_a_key_of_siirl_that_only_has_another_name_is_taken_under_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("dag: {custom_pipeline_fn: 'module.of_mine:pipeline'}\n")
    for loaded in (
        load_config(str(tmp_path / "theirs.yaml"), complete=False),
        load_config("grpo", ["dag.custom_pipeline_fn=module.of_mine:pipeline"], complete=False),
    ):
        assert loaded.config.dag.pipeline == "module.of_mine:pipeline"
        assert any("(siiRL): here it is dag.pipeline" in note for note in loaded.notes)
        assert loaded.origin("dag.pipeline") != "default"


def test_a_run_of_an_earlier_version_may_have_its_keys():
    saved = {"actor_rollout_ref": {"model": {"path": "m"}}, "reward": {"num_actors": 2}}
    assert config_of_run(saved).actor_rollout_ref.model.path == "m"
