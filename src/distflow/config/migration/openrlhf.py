"""OpenRLHF's arguments of `openrlhf.cli.train_ppo_ray`.

Read in OpenRLHF/OpenRLHF: `openrlhf/cli/train_ppo_ray.py` at 021d1b0, and of `examples/scripts`
`train_ppo_ray_hybrid_engine.sh` at 17b714b, `train_prorlv2_math_hybrid_engine.sh` at 8b78539.
"""

from distflow.config.migration.names import ANY, OFF, Name

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"

_SPEED = Name(note="it changes speed and memory, not what is trained", harmless=ANY)
_ONE_PROCESS = Name(note="one process on one device so far, so that it does nothing", harmless=ANY)
_TURNS = Name(note="conversations of several turns are not there yet", harmless=(None,))
_TRACKER = {None: "[console]", False: "[console]"}

NAMES: dict[str, Name] = {
    "pretrain": Name(f"{_M}.path"),
    "critic_pretrain": Name("critic.model.path"),
    "reward_pretrain": Name("reward.functions={default:[{name:model,options:{path:{}}}]}", harmless=(None,)),
    "remote_rm_url": Name(
        "custom_reward_function.path", "a Python file; of servers only a judge's is asked: docs/rewards.md"
    ),
    "agent_func_path": _TURNS,
    "save_path": Name(note="`distflow export` writes a Hugging Face folder"),
    "ckpt_path": Name("trainer.default_local_dir", "the folder of the run"),
    "save_hf_ckpt": Name(note="`distflow export` writes a Hugging Face folder of any checkpoint", harmless=ANY),
    "save_steps": Name("trainer.save_freq"),
    "eval_steps": Name("trainer.test_freq"),
    "logging_steps": Name(note="every step is logged", harmless=ANY),
    "max_ckpt_num": Name("trainer.keep_last"),
    "max_ckpt_mem": _SPEED,
    "load_checkpoint": Name("trainer.resume_mode", values={True: "auto", False: "never"}),
    "disable_ds_ckpt": Name(note="a checkpoint holds all that a run needs to go on", harmless=OFF),
    "num_episodes": Name("trainer.total_epochs", "an episode is a pass over the prompts"),
    "max_epochs": Name(f"{_A}.ppo_epochs", "an epoch is a pass over a batch"),
    "rollout_batch_size": Name("data.train_batch_size", "in prompts"),
    "train_batch_size": Name(
        note=f"OpenRLHF counts answers of an optimizer step: {_A}.ppo_mini_batch_size counts its prompts, "
        "train_batch_size / n_samples_per_prompt; verl's is data.train_batch_size, the prompts of a step"
    ),
    "micro_train_batch_size": Name(note=f"{_A}.ppo_max_token_len_per_gpu bounds a micro-batch in tokens", harmless=ANY),
    "micro_rollout_batch_size": Name(
        note=f"{_A}.ppo_max_token_len_per_gpu bounds a micro-batch in tokens", harmless=ANY
    ),
    "train_max_tokens_per_gpu": Name(f"{_A}.ppo_max_token_len_per_gpu"),
    "rollout_max_tokens_per_gpu": Name("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", harmless=(None,)),
    "use_dynamic_batch": Name(note="micro-batches are always bounded by tokens", harmless=ANY),
    "packing_samples": Name(note="sequences are always packed without padding", harmless=ANY),
    "n_samples_per_prompt": Name(f"{_R}.n"),
    "prompt_max_len": Name("data.max_prompt_length"),
    "generate_max_len": Name("data.max_response_length"),
    "max_len": Name(
        note="prompt and response have a limit each: data.max_prompt_length, data.max_response_length", harmless=(None,)
    ),
    "max_samples": Name("data.train_max_samples", "it counts rows"),
    "temperature": Name(f"{_R}.temperature"),
    "top_p": Name(f"{_R}.top_p"),
    "eval_temperature": Name(f"{_R}.val_kwargs.temperature"),
    "eval_n_samples_per_prompt": Name(f"{_R}.val_kwargs.n", "besides one greedy answer"),
    "seed": Name("trainer.seed={} data.seed={}"),
    "full_determinism": Name(note="on one device a run gives the same bits each time", harmless=ANY),
    # data
    "prompt_data": Name("data.train_files"),
    "eval_dataset": Name("data.val_files"),
    "prompt_data_probs": Name(note="shares of data sets are not there yet: mix the data", harmless=(None,)),
    "prompt_split": Name(note="the split stands behind the data set's id, see docs/data.md", harmless=("train",)),
    "eval_split": Name(note="the split stands behind the data set's id, see docs/data.md"),
    "input_key": Name("data.prompt_key"),
    "label_key": Name("data.answer_key"),
    "input_template": Name("data.prompt_template", "with {prompt} in place of {}", harmless=(None,)),
    "apply_chat_template": Name("data.prompt_format", values={True: "chat", False: "text"}),
    # the algorithm
    "advantage_estimator": Name(
        "algorithm.adv_estimator",
        values={
            "group_norm": "grpo",
            "dr_grpo": "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false",
            "reinforce": "reinforce_plus_plus",
            "reinforce_baseline": "reinforce_plus_plus_baseline",
        },
    ),
    "no_advantage_std_norm": Name("algorithm.norm_adv_by_std_in_grpo", values={True: "false", False: "true"}),
    "gamma": Name("algorithm.gamma"),
    "lambd": Name("algorithm.lam"),
    "eps_clip": Name(f"{_A}.clip_ratio"),
    "eps_clip_low_high": Name(note=f"they are {_A}.clip_ratio_low and {_A}.clip_ratio_high", harmless=(None,)),
    "dual_clip": Name(f"{_A}.clip_ratio_c", values={None: "null"}),
    "value_clip": Name("critic.cliprange_value"),
    "init_kl_coef": Name(
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef={}",
        f"with use_kl_loss it is {_A}.kl_loss_coef",
        values={0: "algorithm.use_kl_in_reward=false"},
    ),
    "use_kl_loss": Name(f"{_A}.use_kl_loss"),
    "kl_estimator": Name(
        f"{_A}.kl_loss_type",
        "in the reward it is algorithm.kl_penalty",
        values={"k1": "kl", "k2": "mse", "k3": "low_var_kl"},
    ),
    "use_kl_estimator_k3": Name(values={True: f"{_A}.kl_loss_type=low_var_kl"}, harmless=OFF),
    "kl_target": Name("algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl={}", harmless=(None,)),
    "kl_horizon": Name("algorithm.kl_ctrl.horizon"),
    "policy_loss_type": Name(f"{_A}.policy_loss", values={"ppo": "vanilla"}),
    "entropy_loss_coef": Name(f"{_A}.entropy_coef", values={None: "0"}),
    "ptx_coef": Name(note="nothing here does that: leave it out", harmless=ANY),
    "aux_loss_coef": Name(note="nothing here does that: leave it out", harmless=(None, 0, 0.0)),
    "normalize_reward": Name(
        note="a reward model's scores are as its head gives them: algorithm.reward_norm", harmless=OFF
    ),
    "reward_clip_range": Name("algorithm.reward_clip", "one bound, for both signs", harmless=(None,)),
    "overlong_buffer_len": Name("reward.overlong.buffer_tokens", values={None: "0"}),
    "overlong_penalty_factor": Name("reward.overlong.factor"),
    "stop_properly_penalty_coef": Name(
        note="reward.overlong.buffer_tokens is a penalty before the limit", harmless=(None,)
    ),
    "dynamic_filtering": Name("algorithm.filter_groups.enable"),
    "dynamic_filtering_reward_range": Name(
        note="groups whose answers are all as right as each other are dropped", harmless=ANY
    ),
    "freezing_actor_steps": Name("trainer.critic_warmup", values={-1: "0"}),
    "enable_vllm_is_correction": Name(f"{_CORRECTION}.level", values={True: "token", False: "null"}),
    "vllm_is_truncated_threshold": Name(f"{_CORRECTION}.cap"),
    "vllm_is_correction_type": Name(
        values={"tis": f"{_CORRECTION}.mode=truncate", "icepop": f"{_CORRECTION}.mode=mask"},
        note=f"options of {_CORRECTION}",
    ),
    # optimizer
    "actor_learning_rate": Name(f"{_A}.optim.lr"),
    "critic_learning_rate": Name("critic.optim.lr"),
    "learning_rate": Name(f"{_A}.optim.lr"),
    "lr_warmup_ratio": Name(f"{_A}.optim.warmup_ratio"),
    "lr_scheduler": Name(
        f"{_A}.optim.scheduler",
        values={
            "cosine_with_min_lr": f"{_A}.optim.scheduler=cosine_with_warmup {_A}.optim.min_lr_ratio=0.1",
            "cosine": "cosine_with_warmup",
            "linear": "linear_with_warmup",
        },
    ),
    "adam_betas": Name(f"{_A}.optim.betas"),
    "l2": Name(f"{_A}.optim.weight_decay"),
    "max_norm": Name(f"{_A}.max_grad_norm"),
    # the model
    "bf16": Name(values={True: f"{_M}.dtype=bfloat16", False: f"{_M}.dtype=float32"}),
    "param_dtype": Name(f"{_M}.dtype", values={"bf16": "bfloat16", "fp16": "bfloat16", "fp32": "float32"}),
    "gradient_checkpointing": Name(f"{_M}.enable_gradient_checkpointing"),
    "gradient_checkpointing_use_reentrant": _SPEED,
    "attn_implementation": _SPEED,
    "flash_attn": _SPEED,
    "use_liger_kernel": _SPEED,
    "lora_rank": Name(f"{_M}.lora_rank"),
    "lora_alpha": Name(f"{_M}.lora_alpha"),
    "target_modules": Name(f"{_M}.target_modules"),
    "lora_dropout": Name(note="adapters drop nothing", harmless=(None, 0, 0.0)),
    "load_in_4bit": Name(note="weights are not quantised", harmless=OFF),
    "enable_ema": Name(note="there is no moving average of the weights", harmless=OFF),
    "ema_beta": Name(note="there is no moving average of the weights", harmless=ANY),
    # placement
    "zero_stage": _ONE_PROCESS,
    "adam_offload": Name(f"{_A}.fsdp_config.optimizer_offload", f"with {_A}.strategy=fsdp", harmless=OFF),
    "ref_reward_offload": Name(
        "actor_rollout_ref.ref.fsdp_config.param_offload", f"with {_A}.strategy=fsdp", harmless=OFF
    ),
    "deepspeed_enable_sleep": _ONE_PROCESS,
    "ds_tensor_parallel_size": Name(note="one device so far", harmless=(1,)),
    "ring_attn_size": Name(note="one device so far", harmless=(1,)),
    "ring_head_stride": _ONE_PROCESS,
    "actor_num_gpus_per_node": Name("trainer.n_gpus_per_node", "with trainer.launcher=ray", harmless=(1,)),
    "actor_num_nodes": Name("trainer.nnodes", "with trainer.launcher=ray", harmless=(1,)),
    "*_num_gpus_per_node": _ONE_PROCESS,
    "*_num_nodes": _ONE_PROCESS,
    "colocate_*": _ONE_PROCESS,
    "vllm_*": Name(note="vLLM is not there yet, so that it does nothing: the embedded engine generates", harmless=ANY),
    "enforce_eager": _SPEED,
    "enable_prefix_caching": _SPEED,
    "async_train": Name(
        values={True: "async.max_staleness=2"},
        note="one batch waits in the queue and one is made meanwhile: async_queue_size + 1 steps",
        harmless=OFF,
    ),
    "partial_rollout": Name(values={True: f"{_R}.kv_on_update=keep"}, harmless=OFF),
    "async_queue_size": Name(note="it counts batches that wait: async.max_staleness is async_queue_size + 1"),
    "local_rank": _ONE_PROCESS,
    # trackers
    "use_wandb": Name(
        "trainer.logger=[console,wandb]", values={old: f"trainer.logger={new}" for old, new in _TRACKER.items()}
    ),
    "use_tensorboard": Name(
        "trainer.logger=[console,tensorboard]", values={old: f"trainer.logger={new}" for old, new in _TRACKER.items()}
    ),
    "wandb_project": Name("trainer.project_name"),
    "wandb_run_name": Name("trainer.experiment_name"),
    "wandb_org": Name(note="wandb reads it from WANDB_ENTITY", harmless=ANY),
    "wandb_group": Name(note="wandb reads it from WANDB_RUN_GROUP", harmless=ANY),
}

PAGES: tuple[tuple[str, str], ...] = (
    (
        "`reward_func(queries, prompts, labels)` of `--remote_rm_url`",
        "`custom_reward_function.path`, see docs/rewards.md",
    ),
    ("`ray job submit`, `--vllm_num_engines`", "one process so far"),
)
"""What is no key: there, here."""
