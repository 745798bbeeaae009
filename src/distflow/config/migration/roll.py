"""ROLL's keys: BaseConfig, PPOConfig, RLVRConfig and the groups of their workers.

Read in alibaba/ROLL: `roll/configs/base_config.py` at 0a6a47e, `roll/pipeline/rlvr/rlvr_config.py` at 2f732c0,
`examples/qwen3-8B-rlvr_sglang/rlvr_config_sglang.yaml` at 5edcd1b.
"""

from distflow.config.migration.names import ANY, OFF, Name

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_OPTIM = f"{_A}.optim"

_SPEED = Name(note="it changes speed and memory, not what is trained", harmless=ANY)
_ONE_PROCESS = Name(note="one process so far, so that it does nothing", harmless=ANY)
_ABSENT = Name(note="nothing here does that: leave it out", harmless=(None, False, 0, 0.0))
_STEPS = Name(
    note=f"it counts answers of an optimizer step; {_A}.ppo_mini_batch_size counts its prompts, and "
    f"{_A}.ppo_max_token_len_per_gpu bounds memory"
)
_DOMAINS = Name(
    note="the share of a domain is its weight: data.domains.NAME={train_files: FILE, weight: 0.4}; weights are relative"
)
_KL = "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef={}"

NAMES: dict[str, Name] = {
    "exp_name": Name("trainer.experiment_name"),
    "seed": Name("trainer.seed={} data.seed={}"),
    "output_dir": Name("trainer.default_local_dir"),
    "logging_dir": Name(note="everything lies in trainer.default_local_dir", harmless=ANY),
    "base_dir": Name(note="everything lies in trainer.default_local_dir", harmless=ANY),
    "rollout_dump_dir": Name(note="the samples of every step are kept in the run's folder", harmless=ANY),
    "track_with": Name(
        "trainer.logger",
        values={"wandb": "[console,wandb]", "tensorboard": "[console,tensorboard]", "stdout": "[console]"},
    ),
    "tracker_kwargs.project": Name("trainer.project_name"),
    "tracker_kwargs*": Name(note="trackers are named in trainer.logger", harmless=ANY),
    "max_steps": Name("trainer.total_training_steps"),
    "save_steps": Name("trainer.save_freq"),
    "eval_steps": Name("trainer.test_freq"),
    "logging_steps": Name(note="every step is logged", harmless=ANY),
    "max_ckpt_to_keep": Name("trainer.keep_last", values={0: "1000"}),
    "resume_from_checkpoint": Name("trainer.resume_mode", values={True: "auto", False: "never"}),
    "num_gpus_per_node": Name("trainer.n_gpus_per_node", "with trainer.launcher=ray", harmless=(1,)),
    "num_nodes": Name("trainer.nnodes", "with trainer.launcher=ray", harmless=(1,)),
    "is_offload_states": Name(
        f"{_A}.fsdp_config.param_offload={{}} {_A}.fsdp_config.optimizer_offload={{}}",
        f"with {_A}.strategy=fsdp",
        harmless=OFF,
    ),
    "pretrain": Name(f"{_M}.path"),
    "reward_pretrain": Name("critic.model.path", "it is where the critic starts"),
    "rollout_batch_size": Name("data.train_batch_size", "in prompts"),
    "val_batch_size": Name(note="validation answers all rows", harmless=ANY),
    "prompt_length": Name("data.max_prompt_length"),
    "response_length": Name("data.max_response_length"),
    "sequence_length": Name(
        note="prompt and response have a limit each: data.max_prompt_length, data.max_response_length"
    ),
    "num_return_sequences_in_group": Name(f"{_R}.n"),
    "is_num_return_sequences_expand": _SPEED,
    "generate_opt_level": _SPEED,
    "max_running_requests": Name(f"{_R}.max_num_seqs"),
    "is_use_additional_prompts": Name(
        values={True: "algorithm.filter_groups.oversampling=0.5"},
        note="0.5 is half as many prompts more as the step lacks",
        harmless=OFF,
    ),
    "max_additional_running_prompts": Name(
        note="algorithm.filter_groups.oversampling is their part of rollout_batch_size: 0.25 for 16 beside 64; all "
        "that may run at once is async.max_concurrent_rollouts, in prompts",
        harmless=(16, 0),
    ),
    "async_generation_ratio": Name("async.max_staleness", "batches made ahead, in steps; a whole number"),
    "ppo_epochs": Name(f"{_A}.ppo_epochs"),
    "max_grad_norm": Name(f"{_A}.max_grad_norm"),
    "l2": Name(f"{_OPTIM}.weight_decay", harmless=(0, 0.0)),
    "gamma": Name("algorithm.gamma"),
    "lambd": Name("algorithm.lam"),
    "adv_estimator": Name("algorithm.adv_estimator"),
    "pg_clip": Name(f"{_A}.clip_ratio"),
    "pg_clip_low": Name(f"{_A}.clip_ratio_low"),
    "pg_clip_high": Name(f"{_A}.clip_ratio_high"),
    "use_pg_clip_range": Name(
        note=f"{_A}.clip_ratio_low and clip_ratio_high are taken where they are set", harmless=ANY
    ),
    "dual_clip_loss": Name(
        values={True: f"{_A}.clip_ratio_c=1.4", False: f"{_A}.clip_ratio_c=null"},
        note="ROLL's bound of the ratio is 1 + 2 × pg_clip, which is 1.4 at its default, pg_clip=0.2",
    ),
    "value_clip": Name("critic.cliprange_value"),
    "kl_penalty": Name("algorithm.kl_penalty"),
    "init_kl_coef": Name(_KL, values={0: "algorithm.use_kl_in_reward=false"}),
    "add_token_level_kl": Name("algorithm.use_kl_in_reward"),
    "target_kl": Name("algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl={}", harmless=(None,)),
    "kl_horizon": Name("algorithm.kl_ctrl.horizon"),
    "use_kl_loss": Name(f"{_A}.use_kl_loss"),
    "kl_loss_coef": Name(f"{_A}.kl_loss_coef"),
    "entropy_loss_coef": Name(f"{_A}.entropy_coef"),
    "loss_agg_mode": Name(f"{_A}.loss_agg_mode"),
    "whiten_advantages": Name(
        note="gae and the reinforce_plus_plus estimators whiten already",
        values={True: "algorithm.adv_norm.mean_level=batch algorithm.adv_norm.std_level=batch"},
        harmless=OFF,
    ),
    "whiten_rewards": Name(
        "algorithm.whiten_rewards",
        "over the tokens of all samples with a verdict, where ROLL leaves out those that a mask left out",
    ),
    "norm_mean_type": Name("algorithm.reward_norm.mean_level"),
    "norm_std_type": Name("algorithm.reward_norm.std_level"),
    "reward_norm": Name("algorithm.reward_norm.mean_level={} algorithm.reward_norm.std_level={}"),
    "reward_shift": Name(values={True: "algorithm.reward_norm.std_level=null"}, harmless=OFF),
    "reward_scale": Name(values={True: "algorithm.reward_norm.mean_level=null"}, harmless=OFF),
    "reward_clip": Name("algorithm.reward_clip", "before the KL is taken off"),
    "advantage_clip": Name("algorithm.advantage_clip"),
    "use_reward_scaling": Name(
        note="of ROLL's older pipelines: over the standard deviation of all rewards so far",
        values={True: "algorithm.reward_norm.std_level=running"},
        harmless=OFF,
    ),
    "use_reward_norm": Name(
        note="with use_reward_scaling: less the mean of all rewards so far",
        values={True: "algorithm.reward_norm.mean_level=running"},
        harmless=OFF,
    ),
    "add_len_reward": Name(
        note="ROLL declares it and reads it nowhere; a length is paid for by the function length in reward.functions, "
        "or by reward.overlong.buffer_tokens",
        harmless=OFF,
    ),
    "critic_warmup": Name("trainer.critic_warmup"),
    "enable_reference": Name(note="a reference is built where a KL term is on", harmless=ANY),
    "enable_old_logprobs_recompute": Name("algorithm.recompute_old_log_probs"),
    "use_topr_loss": Name(values={True: f"{_A}.policy_loss=topr"}, harmless=OFF),
    "use_policy_loss_type": Name(
        values={"PG": f"{_A}.policy_loss=gpg", "PPO": f"{_A}.policy_loss=vanilla"}, note="the loss has a name"
    ),
    "importance_sampling": Name(
        values={"seq": f"{_A}.policy_loss=gspo"}, note="by token is the loss vanilla", harmless=("token",)
    ),
    "val_greedy": Name(f"{_R}.val_kwargs.greedy"),
    "val_n_sample": Name(f"{_R}.val_kwargs.n", "besides one greedy answer"),
    "max_len_mask": Name("algorithm.mask_truncated"),
    "difficulty_mask": Name(
        values={True: "algorithm.difficulty_mask=[0.0,1.0]"},
        note="the band is [difficulty_low_threshold, difficulty_high_threshold], of the share of right answers",
        harmless=OFF,
    ),
    "difficulty_low_threshold": Name(note="the first of algorithm.difficulty_mask", harmless=(0, 0.0)),
    "difficulty_high_threshold": Name(note="the second of algorithm.difficulty_mask", harmless=(1, 1.0)),
    "difficulty_loss_weight": Name(
        values={True: "algorithm.difficulty_weight=[0.5,2.0]"},
        note="how hard a prompt is is measured on its own answers",
        harmless=OFF,
    ),
    "length_loss_weight": Name(values={True: "algorithm.length_weight=[1.5,0.5]"}, harmless=OFF),
    "error_max_len_clip": Name(
        note="error_max_len_threshold is algorithm.mask_long_errors, null where this is off; what is not right is "
        "wrong, where ROLL leaves out every score between 0 and 1",
        harmless=OFF,
    ),
    "error_max_len_threshold": Name("algorithm.mask_long_errors", "where error_max_len_clip is on"),
    "mask_type": Name(
        note="a sample that is left out of the loss stays in the baselines and means of its group; "
        "algorithm.filter_groups drops whole groups before they are trained on",
        harmless=("loss",),
    ),
    "model_update_frequency": Name(f"{_A}.model_update_frequency"),
    # workers
    "actor_train.training_args.learning_rate": Name(f"{_OPTIM}.lr"),
    "actor_train.training_args.weight_decay": Name(f"{_OPTIM}.weight_decay"),
    "actor_train.training_args.warmup_steps": Name(f"{_OPTIM}.lr_warmup_steps"),
    "actor_train.training_args.warmup_ratio": Name(f"{_OPTIM}.warmup_ratio"),
    "actor_train.training_args.lr_scheduler_type": Name(
        f"{_OPTIM}.scheduler", values={name: f"{name}_with_warmup" for name in ("linear", "cosine")}
    ),
    "actor_train.training_args.num_train_epochs": Name("trainer.total_epochs"),
    "*.training_args.per_device_train_batch_size": _STEPS,
    "*.training_args.gradient_accumulation_steps": _STEPS,
    "actor_train.model_args.dtype": Name(f"{_M}.dtype", values={"bf16": "bfloat16", "fp32": "float32"}),
    "actor_train.model_args.disable_gradient_checkpointing": Name(
        f"{_M}.enable_gradient_checkpointing", values={True: "false", False: "true"}
    ),
    "actor_train.model_args.lora_rank": Name(f"{_M}.lora_rank"),
    "actor_train.data_args.file_name": Name("data.train_files"),
    "validation.data_args.file_name": Name("data.val_files"),
    "*.domain_interleave_probs*": _DOMAINS,
    "*.data_args.template": Name(note="the chat template is the tokenizer's", harmless=ANY),
    "*.data_args.*": Name(
        note="columns are named in data.prompt_key, data.answer_key and data.domain_key", harmless=ANY
    ),
    "actor_infer.generating_args.max_new_tokens": Name("data.max_response_length"),
    "actor_infer.generating_args.num_return_sequences": Name(f"{_R}.n"),
    "actor_infer.generating_args.temperature": Name(f"{_R}.temperature"),
    "actor_infer.generating_args.top_p": Name(f"{_R}.top_p"),
    "actor_infer.generating_args.top_k": Name(f"{_R}.top_k"),
    "validation.generating_args.temperature": Name(f"{_R}.val_kwargs.temperature"),
    "validation.generating_args.top_p": Name(f"{_R}.val_kwargs.top_p"),
    "validation.generating_args.top_k": Name(f"{_R}.val_kwargs.top_k"),
    "*.generating_args.num_beams": Name(note="answers are sampled, not searched", harmless=(1,)),
    "*.strategy_args.*": _ONE_PROCESS,
    "*.device_mapping": _ONE_PROCESS,
    "*.num_gpus_per_worker": _ONE_PROCESS,
    "*.infer_batch_size": _SPEED,
    "reference.*": Name(
        note="the reference is the model before the first step, computed as the actor is", harmless=ANY
    ),
    "rewards.*": Name(
        note="a domain's reward worker is its reward, data.domains.NAME.reward or reward.functions.NAME; its "
        "processes, deadline and retries are reward.domains; what asks a model behind an endpoint is judge, what is a "
        "reward model is model"
    ),
}

PAGES: tuple[tuple[str, str], ...] = (
    ("`rlvr_pipeline`", "the preset `rlvr`"),
    (
        "a domain's reward worker",
        "`data.domains.NAME.reward`, or an entry of `reward.functions`, with processes, deadline, retries and back-off "
        "of its own: `reward.domains`",
    ),
    (
        "grouping the batch by domain for masks, `reward_postprocess`, `compute_token_reward`, `compute_advantage`",
        "`algorithm.domains`: what a domain has otherwise; such a domain is normalised and whitened by itself",
    ),
    (
        "`domain_interleave_probs`",
        "`data.domains.NAME.weight`: shares are exact over time, also where groups are dropped; each domain names its "
        "own files, and the column `tag` is not looked at",
    ),
    (
        "dropping groups without a signal",
        "`algorithm.filter_groups.enable=true`, the preset `dapo`; `metric` is `acc` or `seq_reward` as in verl, or "
        "the name of a reward function",
    ),
    (
        "`DynamicSamplingScheduler` with `is_use_additional_prompts`, which aborts what is left",
        "`algorithm.filter_groups.oversampling`: the domains share each step as ever, which groups come first does not "
        "depend on the verifiers' speed, and a prompt that was aborted is asked again",
    ),
)
"""What is no key: there, here."""
