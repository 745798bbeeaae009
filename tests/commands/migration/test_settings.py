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
WORKER = "worker_cls: roll.pipeline.rlvr.rewards."
MATH = f"{WORKER}math_rule_reward_worker.MathRuleRewardWorker"
MEAN = "query_filter_config: {type: mean_filter, "
IFEVAL = f"{WORKER}ifeval_rule_reward_worker.GeneralRuleRewardWorker"
JUDGE = f"{WORKER}llm_judge_reward_worker.LLMJudgeRewardWorker, judge_prompt: P"
RULE = "x --remote_rm_url rule.py"
FILTERS = "algorithm.filter_groups"
OFTEN = (
    "rewards and columns: AReaL",
    "rewards: verl chooses",
    "device_mapping: ",
    "line 1: algorithm.kl_ctrl.",
)


def filtered(*bands: str) -> str:
    """ROLL's domains a, b, ..., each with a filter of its group means."""
    found = [f"  {'abc'[place]}: {{{MATH}, {band}}}\n" for place, band in enumerate(bands)]
    return ROLL + "rewards:\n" + "".join(found)


# name: (kind of file, text, what the config has, what is said)
READ: dict[str, tuple[str, str, dict[str, object], tuple[str, ...]]] = {
    "processes of accelerate on two machines": (
        "sh",
        "accelerate launch --config_file z.yaml --num_machines 2 --num_processes 8 --machine_rank "
        "$RANK "
        "-m trl.scripts.grpo --per_device_train_batch_size 4 --num_generations 16 --dataset_name "
        "d/d "
        "--gradient_accumulation_steps 4 --model_name_or_path m\n",
        {
            "data.train_batch_size": 8,
            "trainer.nnodes": 2,
            "trainer.n_gpus_per_node": 4,
            f"{ROLLOUT}.n": 16,
        },
        (),
    ),
    "processes of torchrun on each of two machines": (
        "sh",
        "torchrun --nproc_per_node 4 --nnodes 2 -m trl.scripts.sft --per_device_train_batch_size 4 "
        "--dataset_name d/d "
        "--model_name_or_path m\n",
        {"data.train_batch_size": 32, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4},
        ("max_length: ", "assistant_only_loss=false: "),
    ),
    "a variable of the caller beside the keys of YAML": (
        "sh",
        "run train.sh --num_generations 8 --beta 0.1 --learning_rate 1e-6 "
        "--per_device_train_batch_size 8 "
        "--output_dir o --max_steps $STEPS\n",
        {f"{ROLLOUT}.n": 8},
        ("max_steps: the shell computes it", "devices: "),
    ),
    "rewards of OpenRLHF": (
        "sh",
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d/d --remote_rm_url r.py "
        "--advantage_estimator group_norm --n_samples_per_prompt 8",
        {"custom_reward_function.path": "r.py"},
        ("reward_func: OpenRLHF calls it with lists, as reward_func(queries, prompts, labels)",),
    ),
    "the trainer of an allocation has no name": (
        "yaml",
        "allocation_mode: sglang:d2+d2\ncluster: {n_nodes: 1, n_gpus_per_node: 4}\n"
        "actor: {path: m}\n"
        "gconfig: {n_samples: 4}\ntrain_dataset: {path: openai/gsm8k, batch_size: 8}\n",
        {"trainer.allocation": "sglang:d2+fsdp:d2"},
        (),
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
    "a setting that its preset contradicts": (
        "sh",
        GRPO + "algorithm.kl_ctrl.horizon=5 +data.apply_chat_template_kwargs.enable_thinking=maybe",
        {"data.train_files": ("a.parquet",)},
        (
            "algorithm.kl_ctrl.horizon=5: a fixed coefficient ignores it",
            "data.enable_thinking is 'maybe', ",
        ),
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
            f"line 1: {ACTOR}.ppo_mini_batch_size: ",
        ),
    ),
    "machines whose number is unread": (
        "sh",
        GRPO + f"trainer.n_gpus_per_node=8 trainer.nnodes=$NODES {ACTOR}.strategy=fsdp2",
        {"trainer.n_gpus_per_node": 8, f"{ACTOR}.strategy": "fsdp"},
        ("line 1: trainer.nnodes: the shell computes it",),
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
    "devices that only generate": (
        "sh",
        OPENRLHF
        + "a/b --actor_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2",
        {"trainer.n_gpus_per_node": 4, f"{ROLLOUT}.tensor_model_parallel_size": 2},
        ("4 more devices generate, score or train a critic",),
    ),
    "engines that run beside training have devices of their own": (
        "sh",
        OPENRLHF
        + "a/b --actor_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 "
        "--ref_num_gpus_per_node 4 --colocate_all_models --async_train",
        {"trainer.n_gpus_per_node": 4, "async.max_staleness": 2},
        ("vllm_num_engines, *_num_gpus_per_node: 4 more devices",),
    ),
    "scores that a reward model normalises": (
        "sh",
        OPENRLHF + "a/b --normalize_reward",
        {"algorithm.reward_shift": 0.0, "algorithm.reward_scale": 1.0},
        ("set algorithm.reward_shift=-MEAN and algorithm.reward_scale=1/STD",),
    ),
    "engines that AReaL names one by one": (
        "yaml",
        AREAL.replace("/tmp/e}", "/tmp/e, n_gpus_per_node: 8}").replace(
            "{path: m", "{backend: 'fsdp:d4p1t1', path: m"
        )
        + "rollout: {backend: 'sglang:d4p1t1', openai: {mode: inline, turn_discount: 1.0}}\n",
        {"trainer.allocation": "sglang:d4p1t1+fsdp:d4p1t1", "trainer.n_gpus_per_node": 8},
        (),
    ),
    "devices that AReaL only trains on": (
        "yaml",
        AREAL.replace("/tmp/e}", "/tmp/e, n_gpus_per_node: 8}") + "allocation_mode: d8p1t1\n",
        {"trainer.allocation": None, "trainer.n_gpus_per_node": 8},
        (),
    ),
    "stages of a pipeline": (
        "yaml",
        AREAL.replace("/tmp/e}", "/tmp/e, n_gpus_per_node: 8}")
        + "allocation_mode: sglang:d4+megatron:d2p2\n",
        {"trainer.allocation": None},
        (
            "trainer.allocation: sglang:d4+megatron:d2p2 has pipeline",
            "allocation_mode=sglang:d4+megatron:d2p2: ",
        ),
    ),
    "a server of vLLM": (
        "yaml",
        "model_name_or_path: m\ndataset_name: a/b\nnum_generations: 8\nuse_vllm: true\n"
        "vllm_mode: server\n"
        "num_processes: 7\n",
        {f"{ROLLOUT}.name": "vllm"},
        ("vllm_mode=server: vLLM generates on devices of its own", "devices: their number"),
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
    "devices of roles that share them": (
        "sh",
        OPENRLHF + "a/b --vllm_num_engines 2 --critic_num_gpus_per_node 2 --critic_num_nodes 1 "
        "--ref_num_gpus_per_node 2 "
        "--colocate_actor_ref --reward_num_gpus_per_node 2 --colocate_critic_reward",
        {},
        ("vllm_num_engines, *_num_gpus_per_node: 4 more devices",),
    ),
    "rewards of a registry": (
        "yaml",
        "model_name_or_path: m\ndataset_name: a/b\nnum_generations: 8\nsystem_prompt: Think.\n"
        "reward_funcs: [tags, "
        "trl.rewards.accuracy_reward, r/m]\nreward_weights: [0.2, 1.0, 0.5]\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\n",
        {
            "data.system_prompt": "Think.",
            "data.prompt_format": "chat",
            "data.answer_key": "solution",
        },
        ("put tags into my_rewards.py", "devices: their number is not in the file"),
    ),
    "devices of other roles": (
        "yaml",
        ROLL
        + (
            "actor_infer: {device_mapping: 'list(range(16,20))'}\n"
            "reference: {device_mapping: 'list(range(0,16))'}\n"
        ),
        {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8},
        ("device_mapping: 4 more devices",),
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
    "a rule's tokenizer": (
        "yaml",
        filtered("model_args: {model_name_or_path: m}"),
        {"data.tag_key": "tag"},
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
    "a tag of two domains": (
        "yaml",
        filtered("tag_included: [t]", "tag_included: [t]"),
        {"data.domains": {}, "data.train_files": ("a.jsonl",)},
        ("the tag 't' is named twice", "data.tag_key=tag: "),
    ),
    "a filter by means": (
        "yaml",
        filtered(
            MEAN + "filter_args: {threshold_up: 0.9, threshold_down: 0.1}}",
            "query_filter_config: {type: no_filter}",
        ),
        {
            f"{FILTERS}.enable": True,
            f"{FILTERS}.metric": "score",
            f"{FILTERS}.mean_range": (0.1, 0.9),
        },
        (),
    ),
    "filters that differ": (
        "yaml",
        filtered(
            MEAN + "filter_args: {threshold_up: 0.9}}", MEAN + "filter_args: {threshold_up: 0.8}}"
        ),
        {f"{FILTERS}.mean_range": (-1.0, 0.9)},
        ("one mean_range holds for all domains, here [-1.0,0.9] of a, not [-1.0,0.8] of b",),
    ),
    "a filter by the standard deviation": (
        "yaml",
        filtered("query_filter_config: {type: std_filter, filter_args: {std_threshold: 0.2}}"),
        {f"{FILTERS}.enable": False},
        (
            (
                "rewards.a.query_filter_config.filter_args.std_threshold=0.2: use "
                "algorithm.filter_groups.enable"
            ),
        ),
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


def test_domains_have_their_rewards_filters_files_and_shares(tmp_path: Path) -> None:
    """Each as `data.domains` names them; what of a reward worker has no counterpart is named."""
    rewards = (
        f"rewards:\n  a: {{{MATH}, {MEAN}filter_args: {{threshold_down: 0.1}}}}, world_size: 8, "
        f"infer_batch_size: 2}}\n"
        f"  b: {{{IFEVAL}, reward_type: soft, response_length_penalty_coef: 0.1}}\n"
        f"  c: {{{IFEVAL}}}\n"
        f"  d: {{{JUDGE}, judge_model_type: inference, model_args: {{model_name_or_path: j/j, "
        f"dtype: bf16}}, "
        "generating_args: {temperature: 0.8, max_new_tokens: 64, top_p: 0.9}}\n"
        f"  e: {{{JUDGE}, judge_model_type: api, judge_model_name: j, judge_api_url: "
        f"'http://h/v1'}}\n"
    )
    found, missing = migrated(tmp_path, "yaml", ROLL + rewards)
    domains = found["data.domains"]
    assert isinstance(domains, dict)
    named = {
        name: [(part.name, dict(part.options)) for part in domain.reward]
        for name, domain in domains.items()
    }
    assert named == {
        "a": [("math", {})],
        "b": [("ifeval_share", {})],
        "c": [("ifeval", {})],
        "d": [("judge", {"model": "j/j", "temperature": 0.8, "answer_tokens": 64})],
        "e": [("judge", {"model": "j", "base_url": "http://h/v1"})],
    }
    assert {name for name, domain in domains.items() if domain.filter_groups is None} == {"a"}
    said = (
        *(
            "rewards.b: ifeval_share reads IFEval's columns",
            "rewards.c: ifeval reads IFEval's columns",
        ),
        *(
            "rewards.d: serve its judge",
            "rewards.d.judge_prompt=P: ",
            "rewards.d.judge_model_type=inference: ",
        ),
        *("rewards.d.generating_args.top_p=0.9: ", "rewards.e.judge_prompt=P: "),
        "rewards.b.response_length_penalty_coef=0.1: ",
    )
    for part in said:
        assert any(line.startswith(part) for line in missing), (part, missing)
    assert len(missing) == len(said), missing


def test_rewards_of_a_registry_have_their_weights(tmp_path: Path) -> None:
    _, text, _, _ = READ["rewards of a registry"]
    functions = migrated(tmp_path, "yaml", text)[0]["reward.functions"]
    assert isinstance(functions, dict)
    found = [(part.name, part.weight) for part in functions["default"]]
    assert found == [("my_rewards.py:tags", 0.2), ("math", 1.0), ("model", 0.5)]


def test_a_reward_model_alone_is_the_score_as_in_verl(tmp_path: Path) -> None:
    found, missing = migrated(
        tmp_path, "sh", PPO + "reward_model.enable=True reward_model.model.path=r/m"
    )
    functions = found["reward.functions"]
    assert isinstance(functions, dict)
    assert [(part.name, part.weight) for part in functions["default"]] == [("math", 0.0)]
    assert found["reward_model.model.path"] == "r/m" and not missing


def test_data_sets_with_shares_are_domains(tmp_path: Path) -> None:
    found, missing = migrated(
        tmp_path, "sh", OPENRLHF + f"{RULE} --prompt_data a/b-1,c/d --prompt_data_probs 0.7,0.3"
    )
    domains = found["data.domains"]
    assert isinstance(domains, dict)
    assert {name: (domain.train_files, domain.weight) for name, domain in domains.items()} == {
        "a_b_1": (("a/b-1",), 0.7),
        "c_d": (("c/d",), 0.3),
    }
    assert not [
        line
        for line in missing
        if not line.startswith(("reward_func: ", "prompt_data is given twice"))
    ]
    _, missing = migrated(
        tmp_path, "sh", OPENRLHF + f"{RULE} --prompt_data a/b,c/d --prompt_data_probs 0.7"
    )
    assert any(line.startswith("data.domains: it cannot be computed") for line in missing)
