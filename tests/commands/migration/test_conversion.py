"""Files of other systems become configs that train the same: sizes are worked out by hand, and what
cannot be carried over is named."""

from pathlib import Path

import pytest
import yaml

from distflow.commands.migration.conversion import as_file, compose, convert
from distflow.commands.migration.read_files import read_foreign
from distflow.commands.migration.settings import ForeignSettings
from distflow.config import flatten, load_config, preset_config
from distflow.config.migration import tables

FILES = Path(__file__).parent / "files"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
OF_TRL = {
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.optim.warmup_ratio": 0.0,
    f"{MODEL}.enable_gradient_checkpointing": True,
    "data.seed": 42,
    "trainer.seed": 42,
    "trainer.test_freq": -1,
    "trainer.keep_last": 1000,
}

# file: (devices that are asked for, preset, what the config sets)
CONFIGS: dict[str, tuple[int | None, str, dict[str, object]]] = {
    # 4 × 8 × 2 devices are 64 completions, of which 8 are of one prompt; each batch is trained on
    # twice, so that 200 optimizer steps are 100 of ours.
    "trl_grpo.sh": (
        None,
        "grpo",
        OF_TRL
        | {
            "algorithm.adv_epsilon": 1e-4,
            "data.enable_thinking": True,
            "algorithm.scale_rewards": "group",
            "algorithm.mask_truncated": True,
            "data.train_batch_size": 8,
            "data.max_response_length": 64,
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.ppo_epochs": 2,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": 0.04,
            f"{ACTOR}.optim.lr": 5e-6,
            f"{ACTOR}.optim.betas": (0.9, 0.99),
            f"{ACTOR}.optim.scheduler": "cosine_with_warmup",
            f"{ROLLOUT}.n": 8,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.engine_kwargs": {"vllm": {"gpu_memory_utilization": 0.3}},
            "algorithm.rollout_correction.rollout_is": "sequence",
            "algorithm.rollout_correction.rollout_is_threshold": (0.0, 3.0),
            f"{ROLLOUT}.temperature": 0.9,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B-Instruct",
            f"{MODEL}.lora_rank": 8,
            f"{MODEL}.lora_alpha": 32,
            f"{MODEL}.target_modules": ("q_proj", "k_proj"),
            "trainer.default_local_dir": "outputs/sums",
            "trainer.experiment_name": "sums",
            "trainer.total_training_steps": 100,
            "trainer.total_epochs": 3,
            "trainer.save_freq": 25,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 2,
        },
    ),
    "verl_grpo.sh": (
        None,
        "verl_grpo",
        {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": ("/data/sums/train.parquet",),
            "data.val_files": ("/data/sums/test.parquet",),
            "data.train_batch_size": 64,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            f"{ACTOR}.ppo_mini_batch_size": 16,
            f"{ACTOR}.entropy_coef": 0.0,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.engine_kwargs": {"vllm": {"gpu_memory_utilization": 0.6}},
            f"{ROLLOUT}.val_kwargs.greedy": False,
            f"{ROLLOUT}.val_kwargs.n": 4,
            "trainer.resume_mode": "never",
        },
    ),
    # 128 samples an optimizer step are 16 prompts of 8.
    "openrlhf_ppo.sh": (
        1,
        "grpo",
        {
            f"{ROLLOUT}.name": "vllm",
            "algorithm.adv_estimator": "grpo",
            "algorithm.reward_clip": 10.0,
            "algorithm.allow_group_of_one": True,
            "algorithm.lam": 1.0,
            "algorithm.use_kl_in_reward": False,
            "data.train_files": ("my/sums",),
            "data.prompt_key": "question",
            "data.answer_key": "answer",
            "data.prompt_format": "chat",
            "data.prompt_template": "Solve: {prompt}",
            "data.enable_thinking": True,
            "data.train_batch_size": 64,
            "data.max_prompt_length": 1024,
            "data.max_response_length": 1024,
            "data.seed": 42,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            f"{MODEL}.dtype": "bfloat16",
            f"{ACTOR}.ppo_mini_batch_size": 16,
            f"{ACTOR}.clip_ratio_low": 0.2,
            f"{ACTOR}.clip_ratio_high": 0.27,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": 1e-3,
            f"{ACTOR}.kl_loss_type": "mse",
            f"{ACTOR}.optim.weight_decay": 0.0,
            f"{ACTOR}.optim.betas": (0.9, 0.95),
            f"{ACTOR}.optim.warmup_ratio": 0.03,
            f"{ACTOR}.optim.min_lr_ratio": 0.1,
            f"{ROLLOUT}.n": 8,
            "reward.functions": {"default": ["custom"]},
            "custom_reward_function.path": "rewards.py",
            "custom_reward_function.name": "reward_func",
            "trainer.total_epochs": 1,
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.keep_last": 3,
            "trainer.logger": ("console", "wandb"),
            "trainer.seed": 42,
        },
    ),
    # 8 devices hold 4 copies: 1 × 16 × 4 samples an optimizer step are 8 prompts of 8.
    "roll_rlvr.yaml": (
        None,
        "rlvr",
        {
            f"{ACTOR}.strategy": "fsdp",
            "trainer.keep_last": 1000,
            **{
                "trainer.total_training_steps": 500,
                "trainer.save_freq": 50,
                "trainer.test_freq": 10,
            },
            "algorithm.adv_estimator": "reinforce",
            "algorithm.reward_norm.mean_level": "group",
            "algorithm.reward_norm.std_level": None,
            "algorithm.reward_clip": None,
            "algorithm.adv_norm.mean_level": "batch",
            "algorithm.adv_norm.std_level": "batch",
            "algorithm.difficulty_mask": (0.1, 1.0),
            "algorithm.allow_group_of_one": True,
            "data.train_files": ("math.jsonl", "code.jsonl"),
            "data.answer_key": "ground_truth",
            "data.prompt_format": "chat",
            "data.train_batch_size": 32,
            "data.max_prompt_length": 64,
            "data.max_response_length": 128,
            "data.seed": 7,
            f"{MODEL}.path": "Qwen/Qwen3-0.6B",
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
            f"{ACTOR}.clip_ratio": 0.1,
            f"{ACTOR}.clip_ratio_c": 1.2,
            f"{ACTOR}.use_kl_loss": False,
            f"{ACTOR}.optim.lr": 1e-6,
            f"{ACTOR}.optim.weight_decay": 0.0,
            f"{ACTOR}.optim.scheduler": "linear_with_warmup",
            f"{ACTOR}.optim.lr_warmup_steps": 5,
            f"{ROLLOUT}.n": 8,
            f"{ROLLOUT}.temperature": 0.9,
            "trainer.experiment_name": "sums-7",
            "trainer.seed": 7,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 8,
        },
    ),
    "areal_grpo.sh": (
        None,
        "grpo",
        {
            "algorithm.adv_estimator": "reinforce",
            "algorithm.use_kl_in_reward": False,
            "algorithm.recompute_old_log_probs": "false",
            "algorithm.allow_group_of_one": True,
            "algorithm.lam": 1.0,
            "algorithm.reward_norm.mean_level": "group",
            "algorithm.reward_norm.std_level": "group",
            "algorithm.reward_norm.group_size": 4,
            "data.train_files": ("my/sums",),
            "data.prompt_format": "chat",
            "data.train_batch_size": 32,
            "data.max_prompt_length": 128,
            "data.max_response_length": 256,
            "data.seed": 3,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            f"{MODEL}.dtype": "bfloat16",
            f"{ACTOR}.policy_loss": "decoupled",
            f"{ACTOR}.policy_loss_kwargs": {"behav_imp_weight_cap": 5.0},
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.clip_ratio": 0.3,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": False,
            f"{ACTOR}.optim.lr": 2e-6,
            f"{ACTOR}.optim.betas": (0.9, 0.95),
            f"{ACTOR}.optim.weight_decay": 0.017,
            f"{ACTOR}.optim.scheduler": "constant_with_warmup",
            f"{ACTOR}.optim.warmup_ratio": 0.001,
            f"{ROLLOUT}.n": 8,
            "async.max_staleness": 2,
            "trainer.project_name": "sums",
            "trainer.experiment_name": "first",
            "trainer.default_local_dir": "/tmp/sums/sums/first",
            "trainer.resume_mode": "never",
            "trainer.total_epochs": 2,
            "trainer.save_freq": -1,
            "trainer.save_freq_epochs": 1,
            "trainer.test_freq": -1,
            "trainer.seed": 3,
        },
    ),
}
MAPS = {"reward.functions", "data.domains"}
MISSING = {
    "trl_grpo.sh": (
        "warmup_steps: the shell computes it",
        "dataset_name: the shell computes it",
        "train_sums_grpo.py is not read",
        "reward_funcs=",
        "top_entropy_quantile=0.2: all tokens contribute",
    ),
    "verl_grpo.sh": (
        "trainer.n_gpus_per_node: the shell computes it",
        "trainer.experiment_name: the shell computes it",
        "data.max_response_length: the shell computes it",
        "a word is not read: the shell computes it",
        "rewards: a function is chosen by each row's data_source",
        "made_up=3",
    ),
    "openrlhf_ppo.sh": (),
    "roll_rlvr.yaml": (
        "rewards: data.domains has",
        "domain_interleave_probs.math_rule=0.7",
        "domain_interleave_probs.code_sandbox=0.3",
        "rewards.math_rule.tag_included=[gsm8k,aime]",
        "rewards.math_rule.worker_cls",
        "rewards.code_sandbox.worker_cls",
    ),
    "areal_grpo.sh": (
        "allocation_mode=sglang:d1+d1",
        "rewards and columns: AReaL's script has them",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_becomes_a_config_and_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    devices, preset, wanted = CONFIGS[name]
    draft = convert(read_foreign(FILES / name), devices)
    path = tmp_path / "migrated.yaml"
    path.write_text(yaml.safe_dump(as_file(draft, compose(draft))))
    for part in MISSING[name]:
        assert any(part in line for line in draft.missing), (part, draft.missing)
    assert len(draft.missing) <= len(MISSING[name]) + 1, draft.missing
    plain = yaml.safe_load(path.read_text())
    assert plain["defaults"] == [preset, "_self_"]
    base = flatten(preset_config(preset))
    found = flatten(load_config(str(path), complete=False).config)

    for key in MAPS & wanted.keys():
        group, entry = key.split(".")
        assert plain[group][entry] == wanted[key]

    by_hand = {key: value for key, value in wanted.items() if key not in MAPS}
    assert {key: found[key] for key in by_hand} == by_hand
    assert {key for key, value in found.items() if value != base[key]} <= wanted.keys() | MAPS, (
        "nothing else differs"
    )


LR = f"{ACTOR}.optim.lr"
MODEL_PATH = f"{MODEL}.path"
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet"

# What stands around a command.
READ = {
    "quotation marks in comments": (
        "sh",
        "# don't change\n# \"small\n"
        f"{VERL} {LR}=3e-6 data.train_batch_size=32 "
        'trainer.experiment_name="a # b"  # don\'t\n',
        {LR: 3e-6, "data.train_batch_size": 32, "trainer.experiment_name": "a # b"},
    ),
    "a penalty that is off": (
        "sh",
        f"{VERL} reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=4096 "
        f"data.max_response_length=8192 trainer.n_gpus_per_node=8\n",
        {"reward.overlong.buffer_tokens": 0, f"{ACTOR}.strategy": "fsdp"},
    ),
    "the mean of GSPO": (
        "sh",
        f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo\n",
        {f"{ACTOR}.policy_loss": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    ),
    "the mean of GSPO as it is set": (
        "sh",
        f"{VERL} {ACTOR}.loss_agg_mode=token-mean {ACTOR}.policy_loss.loss_mode=gspo\n",
        {f"{ACTOR}.policy_loss": "gspo", f"{ACTOR}.loss_agg_mode": "token-mean"},
    ),
    "a quotation with escapes": (
        "sh",
        "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d/d "
        "--input_template \"It's {}\nAnswer: \"  # don't\n",
        {"data.prompt_template": "It's {prompt}\nAnswer: "},
    ),
    "a strategy that the critic names again": (
        "sh",
        (
            f"{VERL} algorithm.adv_estimator=gae {ACTOR}.strategy=fsdp2 critic.strategy=fsdp2 "
            "trainer.n_gpus_per_node=2\n"
        ),
        {f"{ACTOR}.strategy": "fsdp"},
    ),
    "a switch that is negated": (
        "sh",
        "trl grpo --model_name_or_path m --dataset_name d/d --no_scale_rewards\n",
        {"algorithm.scale_rewards": "none"},
    ),
    "lines without a command": (
        "txt",
        f"algorithm.adv_estimator=grpo\ndata.train_batch_size=8\n{MODEL}.path=m\n{ROLLOUT}.n=4\n",
        {"data.train_batch_size": 8, f"{MODEL}.path": "m", f"{ROLLOUT}.n": 4},
    ),
    "a recipe of verl": (
        "sh",
        (
            "python3 -m recipe.fully_async_policy.fully_async_main data.train_files=a.parquet "
            f"{LR}=1e-5 {MODEL}.path=m\n"
        ),
        {LR: 1e-5, f"{MODEL}.path": "m"},
    ),
    "Megatron": (
        "sh",
        f"{VERL} {ACTOR}.strategy=megatron critic.strategy=megatron trainer.n_gpus_per_node=2\n",
        {f"{ACTOR}.strategy": "fsdp"},
    ),
    "one tracker as a list": (
        "yaml",
        (
            "model_name_or_path: m\ndataset_name: d/d\nnum_generations: 4\nlearning_rate: 1e-6\n"
            "report_to: [wandb]\n"
        ),
        {"trainer.logger": ("console", "wandb")},
    ),
    "a reward model of AReaL": (
        "yaml",
        "experiment_name: a\ntrial_name: b\nactor: {path: m/m, is_critic: true, optimizer: {lr: "
        "1e-5}}\n"
        "train_dataset: {path: a/b, type: rw, batch_size: 4}\n"
        "valid_dataset: {path: a/b, batch_size: 4}\n",
        {"data.train_files": ("a/b::train",), "data.val_files": ("a/b::test",), LR: 1e-5},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_what_stands_around_a_setting_is_read(name: str, tmp_path: Path) -> None:
    suffix, text, wanted = READ[name]
    (tmp_path / f"x.{suffix}").write_text(text)
    draft = convert(read_foreign(tmp_path / f"x.{suffix}"), None)
    (tmp_path / "migrated.yaml").write_text(yaml.safe_dump(as_file(draft, compose(draft))))
    found = flatten(load_config(str(tmp_path / "migrated.yaml"), complete=False).config)
    assert {key: found[key] for key in wanted} == wanted
    assert draft.preset == ("rm" if "AReaL" in name else draft.preset)


def test_the_address_of_a_server_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d/d "
        "--remote_rm_url http://localhost:5000/get\n"
    )
    draft = convert(read_foreign(tmp_path / "x.sh"), None)
    assert "custom_reward_function.path" not in draft.overrides
    assert any(
        "remote_rm_url=http://localhost:5000/get: it must be a Python file" in line
        for line in draft.missing
    )


def vanished(system: str, method: str, key: str, value: object) -> bool:
    """Whether a key that stands alone in a file is neither in the config nor said."""
    draft = convert(ForeignSettings(system, method, {key: value}), 1)
    said = "\n".join([*draft.missing, *draft.without_effect])
    return key not in said and not draft.given


ALONE = [
    (system, key.replace("*", "thing"))
    for system in tables.SYSTEMS
    for key in (*tables.table_of_runs(system).names, "made.up", "no_made_up")
]


@pytest.mark.parametrize("value", [True, 0.5, "word", None, {}], ids=str)
def test_no_key_vanishes(value: object) -> None:
    """One of twenty keys of the tables."""
    lost = [each for each in ALONE[::20] if vanished(each[0], "grpo", each[1], value)]
    assert not lost


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo", "sft"])
def test_no_key_of_a_table_vanishes(method: str) -> None:
    lost = [each for each in ALONE if vanished(each[0], method, each[1], 1)]
    assert not lost


SHARES = {
    "TRL": ("grpo", {"use_vllm": True, "vllm_gpu_memory_utilization": 0.3}),
    "OpenRLHF": ("grpo", {"vllm_num_engines": 2, "vllm_gpu_memory_utilization": 0.3}),
    "verl": ("ppo", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": 0.3}),
    "siiRL": ("grpo", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": 0.3}),
    "AReaL": ("grpo", {"vllm.gpu_memory_utilization": 0.3}),
    "ROLL": (
        "grpo",
        {
            "actor_infer.strategy_args.strategy_name": "vllm",
            "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": 0.3,
        },
    ),
}


@pytest.mark.parametrize("system", SHARES)
def test_the_share_of_memory_of_a_server_is_kept(system: str) -> None:
    method, values = SHARES[system]
    draft = convert(ForeignSettings(system, method, values), 1)
    assert draft.overrides[f"{ROLLOUT}.engine_kwargs.vllm.gpu_memory_utilization"] == "0.3"


def test_a_share_of_memory_without_a_server_is_said() -> None:
    draft = convert(ForeignSettings("TRL", "grpo", {"vllm_gpu_memory_utilization": 0.3}), 1)
    assert any("vllm_gpu_memory_utilization=0.3" in line for line in draft.without_effect)


def test_another_strategy_than_that_of_the_file_is_said() -> None:
    draft = convert(ForeignSettings("verl", "grpo", {f"{ACTOR}.strategy": "megatron"}), 2)
    assert any(line.startswith(f"{ACTOR}.strategy=megatron") for line in draft.missing)


def test_a_later_key_for_the_same_setting_is_said() -> None:
    draft = convert(ForeignSettings("TRL", "grpo", {"model": "a", "model_name_or_path": "b"}), 1)
    assert draft.overrides[MODEL_PATH] == "b" and any(
        f"{MODEL_PATH}=a" in line for line in draft.missing
    )


@pytest.mark.parametrize("kind", ["embodied", "EMBODIED"])
def test_a_policy_that_acts_comes_from_siirl(kind: str, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(
        f"python3 -m siirl.main_dag algorithm.workflow_type={kind} {MODEL_PATH}=m "
        "data.dataset_type=embodied "
        "actor_rollout_ref.embodied.action_token_len=7 actor_rollout_ref.embodied.env.num_envs=16 "
        "actor_rollout_ref.embodied.env.env_type=libero "
        "algorithm.embodied_sampling.filter_accuracy=True\n"
    )
    theirs = read_foreign(tmp_path / "x.sh")
    assert (theirs.system, theirs.method) == ("siiRL", "grpo")
    draft = convert(theirs, 1)
    found = flatten(compose(draft).config)
    assert found["dag.pipeline"] == "embodied_srpo" and found[f"{ROLLOUT}.workflow"] == "simulator"
    assert found["embodied_sampling.filter_accuracy"] is True
    assert found[f"{ROLLOUT}.workflow_kwargs"] == {"actions": {"action_dim": 7}, "num_workers": 16}
    assert any("env.env_type=libero" in line and "docs/acting.md" in line for line in draft.missing)


def test_a_config_of_siirl_is_told_by_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "algorithm: {adv_estimator: grpo, workflow_type: dapo}\n"
        "actor_rollout_ref: {rollout: {n: 4}, model: {path: m}}\n"
    )
    theirs = read_foreign(tmp_path / "x.yaml")
    assert (
        theirs.system == "siiRL"
        and flatten(compose(convert(theirs, 1)).config)["dag.pipeline"] == "dapo"
    )


@pytest.mark.parametrize("name", ["dapo", "DAPO", "embodied", "default"])
def test_a_workflow_type_may_have_small_letters(name: str) -> None:
    found = load_config(
        "grpo", ["dag.pipeline=null", f"algorithm.workflow_type={name}"], complete=False
    ).config
    assert found.algorithm.workflow_type == name.upper()
