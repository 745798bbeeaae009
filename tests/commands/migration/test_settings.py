"""A setting of a command or of a YAML file keeps its meaning, or is named."""

from pathlib import Path

import pytest

from distflow.commands.migration.conversion import compose, convert
from distflow.commands.migration.read_files import read_foreign
from distflow.config import flatten

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VERL = f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {MODEL}.path=m "
GRPO = f"{VERL} algorithm.adv_estimator=grpo "
PPO = f"{VERL} algorithm.adv_estimator=gae critic.model.path=m "
SIZES = f"data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.ppo_epochs=2 "
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data "
AREAL = (
    "experiment_name: x\ntrial_name: y\ngconfig: {n_samples: 4}\n"
    "train_dataset: {path: a/b, batch_size: 8}\n"
    "actor: {path: m, optimizer: {lr: 2e-6}}\ncluster: {fileroot: /tmp/e}\n"
)
CRITIC = (
    AREAL + "critic: {path: m, is_critic: true, dtype: bfloat16, optimizer: '${actor.optimizer}'}\n"
)
GSM8K = AREAL.replace("a/b", "openai/gsm8k")
CONSTANT = {"critic.optim.scheduler": "constant_with_warmup", "critic.optim.warmup_ratio": 0.001}
ROLL = (
    "pretrain: m\nrollout_batch_size: 8\nnum_return_sequences_in_group: 8\nactor_train: "
    "{device_mapping: 'list(range(0,16))', data_args: {file_name: [a.jsonl], "
    "domain_interleave_probs: {a: 0.5}}}\n"
)
FILTERS = "algorithm.filter_groups"
OFTEN = (
    "rewards and columns: AReaL",
    "rewards: a function is chosen",
    "rewards: data.domains has",
    "allocation_mode=",
    "actor_train.data_args.domain_interleave_probs",
    "device_mapping: ",
    "algorithm.kl_ctrl.",
)


# name: (kind of file, text, what the config has, what is said)
READ: dict[str, tuple[str, str, dict[str, object], tuple[str, ...]]] = {
    "a variable of the caller beside the keys of YAML": (
        "sh",
        "run train.sh --num_generations 8 --beta 0.1 --learning_rate 1e-6 "
        "--per_device_train_batch_size 8 "
        "--output_dir o --max_steps $STEPS\n",
        {f"{ROLLOUT}.n": 8},
        ("max_steps: the shell computes it", "devices: "),
    ),
    "thinking is switched off": (
        "sh",
        GRPO + "+data.apply_chat_template_kwargs.enable_thinking=False",
        {"data.enable_thinking": False},
        (),
    ),
    "thinking is switched off in a mapping": (
        "sh",
        GRPO + "+data.apply_chat_template_kwargs={enable_thinking:False}",
        {"data.enable_thinking": False},
        (),
    ),
    "a template's own argument": (
        "sh",
        GRPO + '\'+data.apply_chat_template_kwargs={"style": "short"}\'',
        {"data.apply_chat_template_kwargs": {"style": "short"}},
        (),
    ),
    "batches of a filter": (
        "sh",
        GRPO + f"data.gen_batch_size=640 data.train_batch_size=256 {ROLLOUT}.n=4 "
        "algorithm.filter_groups.enable=True "
        "algorithm.filter_groups.max_num_gen_batches=10",
        {f"{FILTERS}.max_num_gen_batches": 25, "data.train_batch_size": 256},
        (),
    ),
    "the code of a folder of another machine": (
        "sh",
        GRPO.replace("path=m", "path=/mnt/models/m") + f"{MODEL}.trust_remote_code=True",
        {f"{MODEL}.trust_remote_code": True},
        (),
    ),
    "a value of the wrong type": (
        "sh",
        GRPO + "+data.apply_chat_template_kwargs.enable_thinking=maybe",
        {"data.train_files": ("a.parquet",)},
        ("data.enable_thinking is 'maybe', ",),
    ),
    "steps of a warm-up": (
        "sh",
        GRPO + SIZES + f"{ACTOR}.optim.lr_warmup_steps=10",
        {
            f"{ACTOR}.optim.lr_warmup_steps": 320,
            f"{ACTOR}.ppo_epochs": 2,
            f"{ACTOR}.ppo_mini_batch_size": 32,
        },
        (),
    ),
    "steps of a warm-up by verl's sizes": (
        "sh",
        GRPO + f"{ACTOR}.optim.lr_warmup_steps=10",
        {f"{ACTOR}.optim.lr_warmup_steps": 40},
        (),
    ),
    "steps of a critic's warm-up": (
        "sh",
        PPO + SIZES + "critic.optim.lr_warmup_steps=10 critic.ppo_epochs=1",
        {
            "critic.optim.lr_warmup_steps": 160,
            f"{ACTOR}.optim.lr_warmup_steps": -1,
            "critic.ppo_epochs": 1,
        },
        (),
    ),
    "a warm-up by a share": (
        "sh",
        GRPO + f"{ACTOR}.optim.lr_warmup_steps=-1",
        {f"{ACTOR}.optim.lr_warmup_steps": -1},
        (),
    ),
    "steps of a warm-up by a size that is unread": (
        "sh",
        GRPO + f"{ACTOR}.ppo_mini_batch_size=$MINI {ACTOR}.optim.lr_warmup_steps=10",
        {f"{ACTOR}.optim.lr_warmup_steps": -1},
        (
            f"{ACTOR}.optim.lr_warmup_steps: the shell computes it",
            f"{ACTOR}.ppo_mini_batch_size: ",
        ),
    ),
    "machines whose number is unread": (
        "sh",
        GRPO + f"trainer.n_gpus_per_node=8 trainer.nnodes=$NODES {ACTOR}.strategy=fsdp2",
        {"trainer.n_gpus_per_node": 8, f"{ACTOR}.strategy": "fsdp"},
        ("trainer.nnodes: the shell computes it",),
    ),
    "verl's adaptive controller": (
        "sh",
        GRPO + "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
        {
            **{"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.mean": "sequence"},
            **{"algorithm.kl_ctrl.target_kl": 0.1, "algorithm.kl_ctrl.horizon": 10000},
        },
        (),
    ),
    "an adaptive controller": (
        "sh",
        OPENRLHF + "a/b --kl_target 6",
        {
            **{"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.mean": "sequence"},
            **{"algorithm.kl_ctrl.target_kl": 6.0, "algorithm.kl_ctrl.horizon": 10000},
        },
        (),
    ),
    "a redirection": (
        "sh",
        OPENRLHF + "a/b --n_samples_per_prompt 4 2>&1 | tee log",
        {f"{ROLLOUT}.n": 4},
        (),
    ),
    "redirections amid options": (
        "sh",
        OPENRLHF
        + (
            "a/b > l --n_samples_per_prompt 4 2>>err --save_path 'a > b' &> 'm n' < in --seed 7 >& "
            "all"
        ),
        {f"{ROLLOUT}.n": 4, "trainer.seed": 7, "data.train_files": ("a/b",)},
        ("save_path='a > b'",),
    ),
    "adapters and sizes of Megatron": (
        "sh",
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml "
        "data.train_files=a.parquet "
        f"{MODEL}.lora.rank=16 {MODEL}.lora.alpha=8 {MODEL}.lora.dropout=0.0 "
        f"{ACTOR}.megatron.use_mbridge=True "
        f"{ACTOR}.megatron.pipeline_model_parallel_size=1 "
        f"{ACTOR}.megatron.tensor_model_parallel_size=4 "
        f"{MODEL}.path=m algorithm.adv_estimator=grpo {ACTOR}.megatron.param_offload=True "
        "trainer.n_gpus_per_node=4",
        {
            f"{MODEL}.lora_rank": 16,
            f"{MODEL}.lora_alpha": 8.0,
            f"{ACTOR}.fsdp_config.param_offload": True,
        },
        ("megatron.tensor_model_parallel_size=4: Megatron is not implemented yet",),
    ),
    "an engine on several devices": (
        "sh",
        GRPO + f"{ROLLOUT}.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8",
        {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 4},
        (),
    ),
    "a reward function of its own": (
        "sh",
        GRPO + "custom_reward_function.path=r.py",
        {"custom_reward_function.path": "r.py"},
        (),
    ),
    "a switch whose value is not read": (
        "sh",
        OPENRLHF + "a/b --use_tensorboard $(date +%m)/runs",
        {"trainer.logger": ("console", "tensorboard")},
        (),
    ),
    "validation of OpenRLHF": (
        "sh",
        OPENRLHF + "a/b --eval_dataset c/d --eval_steps 5",
        {
            **{f"{ROLLOUT}.val_kwargs.greedy": False, f"{ROLLOUT}.val_kwargs.n": 4},
            f"{ROLLOUT}.val_kwargs.temperature": 0.6,
        },
        (),
    ),
    "scores that a reward model normalises": (
        "sh",
        OPENRLHF + "a/b --normalize_reward",
        {"algorithm.reward_shift": 0.0, "algorithm.reward_scale": 1.0},
        ("set algorithm.reward_shift=-MEAN and algorithm.reward_scale=1/STD",),
    ),
    "parts of a data set": (
        "yaml",
        "model_name_or_path: m\ndataset_name: a/b\ndataset_configs: [x, y]\nmax_seq_length: 64\n",
        {"data.train_files": ("a/b:x", "a/b:y")},
        ("devices: their number", "max_length: ", "assistant_only_loss=false"),
    ),
    "options of open-r1": (
        "yaml",
        "model_name_or_path: m\ndataset_name: a/b\ndataset_config: x\ndataset_prompt_column: q\n"
        "num_generations: 8\n"
        "wandb_project: p\nwandb_entity: e\nuse_liger: true\ncode_language: cpp\n",
        {"data.train_files": ("a/b:x",), "data.prompt_key": "q", "trainer.project_name": "p"},
        (
            "wandb_entity=e: ",
            "code_language=cpp: an option of open-r1's reward functions",
            "devices: their number",
        ),
    ),
    "siiRL's drift where its loss does not read it": (
        "sh",
        f"{GRPO} {ACTOR}.policy_drift_coeff=0.001 {ACTOR}.use_cpgd_loss=False",
        {f"{ACTOR}.policy_loss": "vanilla", f"{ACTOR}.policy_loss_kwargs": {}},
        (),
    ),
    "siiRL's drift where its loss reads it": (
        "sh",
        f"{GRPO} {ACTOR}.policy_drift_coeff=0.001 {ACTOR}.use_cpgd_loss=True",
        {
            f"{ACTOR}.policy_loss": "cpgd",
            f"{ACTOR}.policy_loss_kwargs": {"policy_drift_coeff": 0.001},
        },
        (),
    ),
    "a reference that is the policy": ("yaml", AREAL + "ref: {path: '${actor.path}'}\n", {}, ()),
    "batches of AReaL without their dropped groups": (
        "yaml",
        AREAL + "dynamic_bs: true\n",
        {},
        ("dynamic_bs=true: a step always has",),
    ),
    "options that are passed on": (
        "sh",
        "set -e\n" + GRPO + '"$@"\n',
        {},
        ("a word is not read: the shell computes it",),
    ),
    "options of a newer version": (
        "sh",
        "python -m openrlhf.cli.train_ppo_ray --data.prompt_dataset a/b --actor.adam.lr 5e-7 "
        "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4 --data.input_key q "
        "--actor.other 1",
        {
            "actor_rollout_ref.actor.optim.lr": 5e-7,
            f"{ROLLOUT}.n": 4,
            "data.prompt_key": "q",
            "algorithm.adv_estimator": "grpo",
        },
        ("actor.other=1: OpenRLHF's table does not have it",),
    ),
    "ROLL's defaults": (
        "yaml",
        ROLL.replace(
            "{device_mapping", "{model_args: {lora_rank: 32, lora_target: all}, device_mapping"
        ),
        {
            **{"actor_rollout_ref.actor.optim.scheduler": "linear_with_warmup"},
            **{f"{MODEL}.lora_alpha": 64.0, f"{MODEL}.target_modules": "all-linear"},
        },
        (),
    ),
    "ROLL's grpo is reinforce on normalised rewards": (
        "yaml",
        ROLL
        + "adv_estimator: grpo\nnorm_mean_type: group\nnorm_std_type: group\nrpc_timeout: 60\n",
        {
            **{"algorithm.adv_estimator": "reinforce", "algorithm.reward_norm.mean_level": "group"},
            **{"algorithm.reward_norm.std_level": "group"},
        },
        (),
    ),
    "adapters of AReaL": (
        "yaml",
        AREAL.replace(
            "path: m,", "path: m, use_lora: true, peft_type: lora, lora_rank: 16, lora_alpha: 8,"
        )
        + "rollout: {use_lora: true}\nsglang: {enable_lora: true}\n",
        {f"{MODEL}.lora_rank": 16, f"{MODEL}.lora_alpha": 8.0},
        (),
    ),
    "adapters of AReaL that are off": (
        "yaml",
        AREAL.replace("path: m,", "path: m, use_lora: false, lora_rank: 16, lora_alpha: 8,"),
        {f"{MODEL}.lora_rank": 0},
        (),
    ),
    "a KL with the gradient of another": (
        "sh",
        GRPO + f"{ACTOR}.kl_loss_type=k3+",
        {f"{ACTOR}.kl_loss_type": "low_var_kl+"},
        (),
    ),
    "a model beside each checkpoint": (
        "sh",
        GRPO + f"{ACTOR}.checkpoint.save_contents=[model,optimizer,hf_model]",
        {"trainer.save_hf_model": True},
        (),
    ),
    "several data sets": (
        "sh",
        OPENRLHF + "'a/b, c/d' --eval_dataset e/f,g/h",
        {"data.train_files": ("a/b", "c/d"), "data.val_files": ("e/f", "g/h")},
        (),
    ),
    "devices of two nodes": ("yaml", ROLL, {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}, ()),
    "devices that fill no node": (
        "yaml",
        ROLL.replace("16", "12"),
        {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 6},
        (f"{ACTOR}.ppo_mini_batch_size: 1.5 there, rounded up",),
    ),
    "the folder of a trial": (
        "yaml",
        AREAL,
        {
            "trainer.default_local_dir": "/tmp/e/x/y",
            "trainer.resume_mode": "never",
            "trainer.project_name": "x",
        },
        ("rewards and columns: AReaL's script has them",),
    ),
    "a switch of YAML": (
        "yaml",
        AREAL + "recover: {mode: on}\n",
        {"trainer.resume_mode": "auto"},
        (),
    ),
    "a section that is another's": ("yaml", CRITIC, {"critic.optim.lr": 2e-6, **CONSTANT}, ()),
    "mini-batches of a critic": (
        "yaml",
        CRITIC.replace("is_critic", "ppo_n_minibatches: 2, is_critic"),
        {"critic.ppo_mini_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 2},
        (),
    ),
    "GSM8K of AReaL": (
        "yaml",
        GSM8K + "valid_dataset: {path: openai/gsm8k}\n",
        {
            **{
                "data.train_files": ("openai/gsm8k:main:train",),
                "data.val_files": ("openai/gsm8k:main:test",),
            },
            "data.prompt_key": "question",
            "data.prompt_template": "{prompt}\nPlease put your final answer within \\boxed{{}}.",
        },
        (),
    ),
    "a norm of which only the mean is given": (
        "yaml",
        AREAL.replace("optimizer", "adv_norm: {mean_level: group}, optimizer"),
        {"algorithm.adv_norm.mean_level": "group", "algorithm.adv_norm.std_level": "batch"},
        (),
    ),
    "a critic without options of generation": (
        "yaml",
        CRITIC.replace("gconfig: {n_samples: 4}\n", ""),
        {"dag.pipeline": "ppo", f"{ROLLOUT}.n": 1, "critic.optim.lr": 2e-6},
        (),
    ),
    "a folder of GSM8K": (
        "yaml",
        GSM8K.replace("openai", "/data"),
        {"data.train_files": ("/data/gsm8k",)},
        (),
    ),
}


def migrated(folder: Path, suffix: str, text: str) -> tuple[dict[str, object], list[str]]:
    (folder / f"x.{suffix}").write_text(text)
    draft = convert(read_foreign(folder / f"x.{suffix}"), None)
    return flatten(compose(draft).config), draft.missing


@pytest.mark.parametrize("name", READ)
def test_a_setting_keeps_its_meaning_or_is_named(name: str, tmp_path: Path) -> None:
    suffix, text, wanted, said = READ[name]
    found, missing = migrated(tmp_path, suffix, text)
    assert {key: found[key] for key in wanted} == wanted
    for part in said:
        assert any(part in line for line in missing), (part, missing)
    unsaid = [line for line in missing if not any(part in line for part in said)]
    assert not [line for line in unsaid if not line.startswith(OFTEN)]


def test_a_reward_model_alone_is_the_score_as_in_verl(tmp_path: Path) -> None:
    found, missing = migrated(
        tmp_path, "sh", PPO + "reward_model.enable=True reward_model.model.path=r/m"
    )
    functions = found["reward.functions"]
    assert isinstance(functions, dict)
    assert [(part.name, part.weight) for part in functions["default"]] == [("math", 0.0)]
    assert found["reward_model.model.path"] == "r/m" and not missing
