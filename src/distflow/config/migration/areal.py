"""AReaL's keys: BaseExperimentConfig, GRPOConfig, PPOConfig and their groups.

Read in inclusionAI/AReaL: `areal/api/cli_args.py` at 0073c33, `examples/math/gsm8k_grpo.yaml` at 00d07c0.
"""

from distflow.config.migration.names import ANY, OFF, Name

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_OPTIM = f"{_A}.optim"

_SPEED = Name(note="it changes speed and memory, not what is trained", harmless=ANY)
_ENGINE = Name(
    note="SGLang and vLLM are not there yet, so that it does nothing: the embedded engine generates", harmless=ANY
)
_SCHEDULING = Name(note="one process so far, so that it does nothing", harmless=ANY)
_EPOCHS = Name(note="it counts steps here, not epochs", harmless=(None,))
_SECONDS = Name(note="it counts steps here, not seconds", harmless=(None,))
_CONSUMED = Name("data.train_batch_size", "in prompts")
_KL = Name(
    "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef={}",
    "without a critic, algorithm.adv_estimator=reinforce",
    values={0: "algorithm.use_kl_in_reward=false"},
)
_STALENESS = Name("async.max_staleness", "in steps, as there; no token of a sample is older")
_CONCURRENT = Name(
    "async.max_concurrent_rollouts", "in prompts; left out, it is max_staleness + 1 batches here, one batch there"
)
_ONE_ENGINE = Name(note="one engine generates, so that it does nothing", harmless=ANY)
_SWAPPED = Name(note="weights are swapped between two decode steps: no request is flushed or waited for", harmless=ANY)
_DECOUPLED = Name(values={True: f"{_A}.policy_loss=decoupled"}, harmless=OFF)
_LOSS_OPTIONS = f"{_A}.policy_loss_kwargs"
_CAP = Name(f"{_LOSS_OPTIONS}.behav_imp_weight_cap", "an option of the loss decoupled")
_CAP_MODE = Name(
    values={
        "token_mask": f"{_LOSS_OPTIONS}.behav_imp_weight_mode=mask",
        "token_truncate": f"{_LOSS_OPTIONS}.behav_imp_weight_mode=clamp",
        "sequence_mask": f"{_LOSS_OPTIONS}.rejection_sampling={{level:sequence,action:mask,upper:5.0}}",
        "sequence_truncate": f"{_LOSS_OPTIONS}.rejection_sampling={{level:sequence,action:clamp,upper:5.0}}",
        "disabled": f"{_LOSS_OPTIONS}.behav_imp_weight_cap=null",
    },
    note="upper is the cap there",
)
_REJECTION = f"{_LOSS_OPTIONS}.rejection_sampling"
_REJECTION_OPTIONS = ("level", "action", "metric", "agg", "upper", "lower")
_OLD_LOG_PROBS = Name("algorithm.recompute_old_log_probs", "auto leaves the pass out where the ratio is 1 anyway")
_ANSWERS = {
    "n_samples": Name(f"{_R}.n"),
    "max_new_tokens": Name("data.max_response_length"),
    "min_new_tokens": Name(note="a response may end at once", harmless=(None, 0)),
    "max_tokens": Name(note="the longest sample is data.max_prompt_length + data.max_response_length", harmless=ANY),
    "greedy": Name(note=f"training always samples; validation has {_R}.val_kwargs.greedy", harmless=OFF),
    "temperature": Name(f"{_R}.temperature"),
    "top_p": Name(f"{_R}.top_p"),
    "top_k": Name(f"{_R}.top_k", values={100000000: "-1"}),
    "stop": Name(f"{_R}.stop"),
    "stop_token_ids": Name(note=f"{_R}.stop takes texts", harmless=(None, [])),
    "frequency_penalty": Name(note=f"there is {_R}.repetition_penalty", harmless=(None, 0, 0.0)),
}
_GROUPS = ("actor", "ref", "critic", "rollout", "saver", "evaluator", "recover", "stats_logger", "perf_tracer")
_NORM = ("mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps")

NAMES: dict[str, Name] = {
    "trial_name": Name("trainer.experiment_name", "experiment_name there is trainer.project_name here"),
    "experiment_name": Name("trainer.project_name", "trial_name there is trainer.experiment_name here"),
    **{f"{group}.experiment_name": Name(note="it goes with trainer.project_name", harmless=ANY) for group in _GROUPS},
    **{f"{group}.trial_name": Name(note="it goes with trainer.experiment_name", harmless=ANY) for group in _GROUPS},
    **{f"{group}.fileroot": Name(note="it goes with trainer.default_local_dir", harmless=ANY) for group in _GROUPS},
    "seed": Name("trainer.seed={} data.seed={}"),
    "total_train_epochs": Name("trainer.total_epochs"),
    "total_train_steps": Name("trainer.total_training_steps"),
    "total_train_n_seqs": Name(note="trainer.total_training_steps counts steps", harmless=(None,)),
    "tokenizer_path": Name(f"{_M}.tokenizer_path"),
    "enable_offload": Name(
        f"{_A}.fsdp_config.param_offload={{}} {_A}.fsdp_config.optimizer_offload={{}}",
        f"with {_A}.strategy=fsdp",
        harmless=OFF,
    ),
    "allocation_mode": Name(
        "trainer.allocation", "with trainer.launcher=ray; each part names its engine", harmless=(None, "")
    ),
    "cluster.n_nodes": Name("trainer.nnodes", "with trainer.launcher=ray", harmless=(1,)),
    "cluster.n_gpus_per_node": Name("trainer.n_gpus_per_node", "with trainer.launcher=ray", harmless=(1,)),
    "cluster.fileroot": Name("trainer.default_local_dir", "the folder of the run"),
    "cluster.*": _SCHEDULING,
    "scheduler.*": _SCHEDULING,
    "launcher.*": _SCHEDULING,
    "*.scheduling_spec*": _SCHEDULING,
    "*.scheduling_strategy*": _SCHEDULING,
    "sglang.*": _ENGINE,
    "vllm.*": _ENGINE,
    # generation
    **{f"gconfig.{name}": meaning for name, meaning in _ANSWERS.items()},
    "eval_gconfig.n_samples": Name(f"{_R}.val_kwargs.n", "besides one greedy answer"),
    "eval_gconfig.temperature": Name(f"{_R}.val_kwargs.temperature"),
    "eval_gconfig.top_p": Name(f"{_R}.val_kwargs.top_p"),
    "eval_gconfig.top_k": Name(f"{_R}.val_kwargs.top_k", values={100000000: "-1"}),
    "eval_gconfig.greedy": Name(f"{_R}.val_kwargs.greedy", "the greedy answer comes besides the sampled ones"),
    "eval_gconfig.max_new_tokens": Name(note="data.max_response_length bounds these answers too"),
    # asynchrony
    **{f"{group}max_head_offpolicyness": _STALENESS for group in ("rollout.", "async.", "")},
    **{f"{group}max_concurrent_rollouts": _CONCURRENT for group in ("rollout.", "")},
    **{f"{group}schedule_policy": _ONE_ENGINE for group in ("rollout.", "async.", "")},
    **{f"{group}flush_request_timeout": _SWAPPED for group in ("rollout.", "async.", "")},
    **{f"{group}new_tokens_per_chunk": _SWAPPED for group in ("rollout.", "async.", "")},
    **{f"{group}use_decoupled_loss": _DECOUPLED for group in ("actor.", "async.", "ppo.")},
    **{f"{group}{word}_imp_weight_cap": _CAP for group in ("actor.", "async.", "ppo.") for word in ("behav", "behave")},
    **{f"{group}{word}_imp_weight_mode": _CAP_MODE for group in ("actor.", "async.") for word in ("behav", "behave")},
    **{f"{group}recompute_logprob": _OLD_LOG_PROBS for group in ("actor.", "async.", "ppo.")},
    "actor.prox_logp_method": Name(
        f"{_A}.prox",
        "of the decoupled loss",
        {"recompute": "recompute", "loglinear": "interpolate"},
    ),
    **{f"actor.rejection_sampling.{name}": Name(f"{_REJECTION}.{name}") for name in _REJECTION_OPTIONS},
    "async_training": Name(note="generation runs ahead where async.max_staleness is above 0", harmless=ANY),
    "rollout.consumer_batch_size": _CONSUMED,
    "async.consumer_batch_size": _CONSUMED,
    "rollout.queue_size": Name(note="the edge holds whatever async.max_staleness lets in", harmless=ANY),
    "async.queue_size": Name(note="the edge holds whatever async.max_staleness lets in", harmless=ANY),
    "rollout.pause_grace_period": _SWAPPED,
    "rollout.check_trajectory_format": Name(note="the columns of every step are always checked", harmless=ANY),
    "rollout.request_timeout": _SPEED,
    "rollout.request_retries": _SPEED,
    "rollout.setup_timeout": _SPEED,
    "rollout.dump_to_file": Name(note="the samples of every step are kept in the run's folder", harmless=ANY),
    "rollout.tokenizer_path": Name(f"{_M}.tokenizer_path"),
    "rollout.enable_rollout_tracing": Name(note="spans are recorded in the run's folder", harmless=ANY),
    "n_rollout_workers": _ONE_ENGINE,
    # the actor
    "actor.path": Name(f"{_M}.path"),
    "actor.init_from_scratch": Name(f"{_M}.init", values={True: "random", False: "pretrained"}),
    "actor.dtype": Name(f"{_M}.dtype"),
    "actor.gradient_checkpointing": Name(f"{_M}.enable_gradient_checkpointing"),
    "actor.attn_impl": _SPEED,
    "actor.disable_dropout": Name(note="pretrained decoders drop nothing", harmless=ANY),
    "actor.pad_to_maximum": Name(note="sequences are always packed without padding", harmless=ANY),
    "actor.grad_reduce_dtype": _SCHEDULING,
    "actor.weight_update_mode": Name(
        f"{_A}.weight_update_mode",
        "to workers that only generate (trainer.allocation); within a process weights are copied in memory, and there "
        "is no collective broadcast",
        {"disk": "disk"},
        harmless=("xccl", "nccl"),
    ),
    "actor.mb_spec.max_tokens_per_mb": Name(f"{_A}.ppo_max_token_len_per_gpu"),
    "actor.mb_spec.*": _SPEED,
    "actor.use_lora": Name(note=f"adapters are on where {_M}.lora_rank is above 0", harmless=OFF),
    "actor.lora_rank": Name(f"{_M}.lora_rank"),
    "actor.lora_alpha": Name(f"{_M}.lora_alpha"),
    "actor.target_modules": Name(f"{_M}.target_modules"),
    "actor.optimizer.type": Name(f"{_OPTIM}.optimizer", values={"adam": "adamw"}),
    "actor.optimizer.lr": Name(f"{_OPTIM}.lr"),
    "actor.optimizer.weight_decay": Name(f"{_OPTIM}.weight_decay"),
    "actor.optimizer.beta1": Name(f"{_OPTIM}.betas=[{{}},0.999]"),
    "actor.optimizer.beta2": Name(f"{_OPTIM}.betas=[0.9,{{}}]"),
    "actor.optimizer.eps": Name(f"{_OPTIM}.eps"),
    "actor.optimizer.lr_scheduler_type": Name(
        f"{_OPTIM}.scheduler",
        values={name: f"{name}_with_warmup" for name in ("constant", "linear", "cosine")},
    ),
    "actor.optimizer.min_lr_ratio": Name(f"{_OPTIM}.min_lr_ratio"),
    "actor.optimizer.warmup_steps_proportion": Name(f"{_OPTIM}.warmup_ratio"),
    "actor.optimizer.gradient_clipping": Name(f"{_A}.max_grad_norm"),
    "actor.optimizer.offload": Name(f"{_A}.fsdp_config.optimizer_offload", f"with {_A}.strategy=fsdp", harmless=OFF),
    "actor.optimizer.*": _SPEED,
    "actor.fsdp.*": _SCHEDULING,
    "actor.megatron.*": _SCHEDULING,
    "actor.group_size": Name(f"{_R}.n"),
    "group_size": Name(f"{_R}.n"),
    "actor.ppo_n_minibatches": Name(
        note=f"mini-batches a step: {_A}.ppo_mini_batch_size is data.train_batch_size / ppo_n_minibatches"
    ),
    "actor.eps_clip": Name(f"{_A}.clip_ratio"),
    "actor.eps_clip_higher": Name(f"{_A}.clip_ratio_high", values={None: "null"}),
    "actor.c_clip": Name(f"{_A}.clip_ratio_c"),
    "actor.temperature": Name(f"{_R}.temperature"),
    "actor.max_new_tokens": Name("data.max_response_length"),
    "actor.m2_threshold": Name(note="there is no such loss", harmless=(None,)),
    "actor.reward_scaling": Name("algorithm.reward_scale"),
    "actor.reward_bias": Name("algorithm.reward_shift"),
    "actor.reward_clip": Name(
        "algorithm.reward_clip", "it bounds rewards behind reward_norm", harmless=(None, 20, 20.0)
    ),
    "actor.overlong_reward_penalty": Name(note="on where reward.overlong.buffer_tokens is above 0", harmless=OFF),
    "actor.overlong_tokens": Name("reward.overlong.buffer_tokens"),
    "actor.overlong_penalty_factor": Name("reward.overlong.factor"),
    "actor.mask_no_eos_with_zero": Name(note="cut-off answers count", harmless=OFF),
    "actor.discount": Name("algorithm.gamma"),
    "actor.gae_lambda": Name("algorithm.lam"),
    **{f"actor.reward_norm.{name}": Name(f"algorithm.reward_norm.{name}") for name in _NORM},
    **{f"actor.adv_norm.{name}": Name(f"algorithm.adv_norm.{name}") for name in _NORM},
    "actor.reward_norm.group_size": Name(
        "algorithm.reward_norm.group_size", "only to cut a prompt's samples into smaller groups", harmless=(None, 1)
    ),
    "actor.adv_norm.group_size": Name(
        "algorithm.adv_norm.group_size", "only to cut a prompt's samples into smaller groups", harmless=(None, 1)
    ),
    "actor.kl_ctl": _KL,
    "actor.kl_estimator": Name("algorithm.kl_penalty", values={"k1": "kl", "k2": "mse", "k3": "low_var_kl"}),
    "actor.importance_sampling_level": Name(
        values={"sequence": f"{_A}.policy_loss=gspo"}, note="by token is the loss vanilla", harmless=("token",)
    ),
    "actor.dynamic_sampling": Name("algorithm.filter_groups.enable"),
    "actor.log_agent_stats*": Name(note="nothing here does that: leave it out", harmless=ANY),
    # reference and critic
    "ref.path": Name(note="the reference is the model before the first step", harmless=(None,)),
    "ref.mb_spec.max_tokens_per_mb": Name("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
    "ref.*": Name(note="the reference is the model before the first step, computed as the actor is", harmless=ANY),
    "critic.path": Name("critic.model.path"),
    "critic.eps_clip": Name("critic.cliprange_value"),
    "critic.mb_spec.max_tokens_per_mb": Name("critic.ppo_max_token_len_per_gpu"),
    "critic.optimizer.lr": Name("critic.optim.lr"),
    # data
    "train_dataset.path": Name("data.train_files"),
    "train_dataset.batch_size": _CONSUMED,
    "train_dataset.shuffle": Name("data.shuffle"),
    "train_dataset.max_length": Name("data.max_prompt_length"),
    "train_dataset.num_workers": Name("data.num_loader_workers"),
    "train_dataset.*": _SPEED,
    "valid_dataset.path": Name("data.val_files"),
    "valid_dataset.*": Name(note="validation answers all rows", harmless=ANY),
    # the run
    "saver.freq_steps": Name("trainer.save_freq", values={None: "-1"}),
    "saver.freq_epochs": _EPOCHS,
    "saver.freq_secs": _SECONDS,
    "evaluator.freq_steps": Name("trainer.test_freq", values={None: "-1"}),
    "evaluator.eval_before_train": Name("trainer.val_before_train"),
    "evaluator.freq_epochs": _EPOCHS,
    "evaluator.freq_secs": _SECONDS,
    "recover.mode": Name("trainer.resume_mode", values={"disabled": "never", "fault": "auto", "resume": "auto"}),
    "recover.*": Name(note="a run goes on from its checkpoints: trainer.save_freq", harmless=ANY),
    "stats_logger.wandb.mode": Name(
        values={"online": "trainer.logger=[console,wandb]", "offline": "trainer.logger=[console,wandb]"},
        harmless=("disabled",),
    ),
    "stats_logger.*": Name(note="trackers are named in trainer.logger", harmless=ANY),
    "perf_tracer.*": Name(note="spans are recorded in the run's folder", harmless=ANY),
}

PAGES: tuple[tuple[str, str], ...] = (
    ("`arun_episode`, workflows", "one prompt, one answer so far"),
    ("`reward_norm`, `adv_norm`", "the same options, below `algorithm`"),
    (
        "asynchronous training, decoupled PPO, staleness, the counters of the staleness manager",
        "the presets `async_grpo` and `async_ppo`; [asynchrony](async.md#coming-from-areal)",
    ),
)
"""What is no key: there, here."""
