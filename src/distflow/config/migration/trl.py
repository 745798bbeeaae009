"""TRL's arguments: GRPOConfig, GRPOTrainer, PPOConfig, SFTConfig, ModelConfig, LoraConfig, and what they have of
transformers' TrainingArguments.

Read in huggingface/trl: `trainer/grpo_config.py` at 006d32c and `sft_config.py` at 016013e (both of 2026),
`ppo_config.py` at 008c2a6 (the first PPOTrainer), `model_config.py` at 040e32d, `examples/scripts/gspo.py` at 07e1b4f.
"""

from distflow.config.migration.names import ANY, OFF, Name

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_OPTIM = f"{_A}.optim"
_CORRECTION = "algorithm.rollout_correction"
_KL_LOSS = f"{_A}.use_kl_loss=true {_A}.kl_loss_coef={{}}"
_KL_REWARD = "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef={}"
_BATCH = (
    "TRL counts completions: per_device_train_batch_size × gradient_accumulation_steps × devices make an optimizer "
    f"step. Here data.train_batch_size and {_A}.ppo_mini_batch_size count prompts: both are that product / "
    f"num_generations, unless steps_per_generation is larger (in fine-tuning, examples: that product); "
    f"{_A}.ppo_max_token_len_per_gpu bounds memory"
)

_SPEED = Name(note="it changes speed and memory, not what is trained", harmless=ANY)
_LOGGED = Name(note="every step is logged, with its samples, in the run's folder", harmless=ANY)
_ONE_PROCESS = Name(note="one process on one device so far", harmless=(None, False, "", "no"))
_ONE_PROCESS_OPTION = Name(note="one process on one device so far, so that it does nothing", harmless=ANY)
_VLLM_OPTION = Name(note="vLLM is not there yet, so that it does nothing", harmless=ANY)
_HUB = Name(note="`distflow export` writes a Hugging Face folder that you can upload", harmless=OFF)
_MOVING_REFERENCE = Name(note="the reference stays the model before the first step", harmless=OFF)
_ABSENT = Name(note="nothing here does that: leave it out", harmless=OFF)
_TOOLS = Name(
    note="tools are not called, and conversations of several turns not generated yet; a chat template is shown those "
    "of a row (data.tools_key)",
    harmless=OFF,
)
_REWARD_MODEL = Name("reward.functions={default:[{name:model,options:{path:{}}}]}", harmless=(None,))
_TEXT = "columns are named: data.prompt_key and data.response_key, or data.messages_key of whole conversations"

NAMES: dict[str, Name] = {
    # the model
    "model": Name(f"{_M}.path"),
    "model_name_or_path": Name(f"{_M}.path"),
    "sft_model_path": Name(f"{_M}.path"),
    "model_name": Name(f"{_M}.path"),
    "model_revision": Name(f"{_M}.revision"),
    "processing_class": Name(f"{_M}.tokenizer_path"),
    "tokenizer_name_or_path": Name(f"{_M}.tokenizer_path"),
    "model_init_kwargs": Name(note=f"its entries have keys: {_M}.dtype, {_M}.revision, {_M}.trust_remote_code"),
    "torch_dtype": Name(f"{_M}.dtype", values={"auto": "bfloat16", "float16": "bfloat16"}),
    "dtype": Name(f"{_M}.dtype", values={"auto": "bfloat16", "float16": "bfloat16"}),
    "bf16": Name(values={True: f"{_M}.dtype=bfloat16", False: f"{_M}.dtype=float32"}),
    "fp16": Name(note=f"float16 is not there: {_M}.dtype is bfloat16 or float32", harmless=OFF),
    "tf32": _SPEED,
    "attn_implementation": _SPEED,
    "use_flash_attention_2": _SPEED,
    "use_liger_kernel": _SPEED,
    "use_liger_loss": _SPEED,
    "torch_compile": _SPEED,
    "torch_compile_backend": _SPEED,
    "torch_compile_mode": _SPEED,
    "activation_offloading": _SPEED,
    "torch_empty_cache_steps": _SPEED,
    "auto_find_batch_size": _SPEED,
    "cast_lm_head_to_fp32": Name(note=f"weights are kept in float32; {_M}.dtype is what is computed in", harmless=OFF),
    "disable_dropout": Name(note="pretrained decoders drop nothing", harmless=ANY),
    "gradient_checkpointing": Name(f"{_M}.enable_gradient_checkpointing"),
    "gradient_checkpointing_kwargs": _SPEED,
    "load_in_4bit": Name(note="weights are not quantised", harmless=OFF),
    "load_in_8bit": Name(note="weights are not quantised", harmless=OFF),
    "peft_config": Name(
        note=f"its entries have keys: {_M}.lora_rank, {_M}.lora_alpha, {_M}.target_modules", harmless=(None,)
    ),
    "use_peft": Name(note=f"adapters are on where {_M}.lora_rank is above 0", harmless=OFF),
    "lora_r": Name(f"{_M}.lora_rank"),
    "lora_alpha": Name(f"{_M}.lora_alpha"),
    "lora_target_modules": Name(f"{_M}.target_modules"),
    "lora_dropout": Name(note="adapters drop nothing", harmless=(None, 0, 0.0)),
    "lora_modules_to_save": Name(note="only adapters are trained beside the frozen weights", harmless=(None,)),
    # data
    "train_dataset": Name("data.train_files"),
    "dataset_name": Name("data.train_files"),
    "eval_dataset": Name("data.val_files"),
    "dataset_train_split": Name(
        note="the split stands behind the data set's id, see docs/data.md", harmless=("train",)
    ),
    "dataset_test_split": Name(note="validation data are data.val_files"),
    "max_prompt_length": Name(
        "data.max_prompt_length",
        "TRL cuts longer prompts from the left, as data.filter_overlong_prompts=false data.truncation=left; here they "
        "are left out",
    ),
    "max_completion_length": Name("data.max_response_length"),
    "response_length": Name("data.max_response_length"),
    "max_new_tokens": Name("data.max_response_length"),
    "max_length": Name(note="prompt and response have a limit each: data.max_prompt_length, data.max_response_length"),
    "max_seq_length": Name(
        note="prompt and response have a limit each: data.max_prompt_length, data.max_response_length"
    ),
    "max_model_length": Name(
        note="the longest sample is data.max_prompt_length + data.max_response_length", harmless=(None,)
    ),
    "truncation_mode": Name("data.truncation", values={"keep_start": "right", "keep_end": "left"}),
    "shuffle_dataset": Name("data.shuffle"),
    "data_seed": Name("data.seed"),
    "dataset_num_proc": Name("data.num_loader_workers"),
    "dataloader_num_workers": Name("data.num_loader_workers"),
    "dataloader_drop_last": Name(note="steps cross the borders of epochs, so that no row is left out", harmless=OFF),
    "dataloader_*": _SPEED,
    "remove_unused_columns": Name(note="a reward function is handed the row's columns as extra_info", harmless=OFF),
    "dataset_text_field": Name(note=_TEXT),
    "dataset_kwargs": Name(note=_TEXT, harmless=(None,)),
    "formatting_func": Name("data.prompt_template", harmless=(None,)),
    "chat_template_kwargs": Name("data.apply_chat_template_kwargs", harmless=(None,)),
    "chat_template_path": Name(f"{_M}.tokenizer_path", "the template is the tokenizer's", harmless=(None,)),
    "eos_token": Name(note="the end token is the tokenizer's", harmless=(None,)),
    "pad_token": Name(note="nothing is padded", harmless=ANY),
    "packing": Name(note="micro-batches are always packed, and examples do not see each other", harmless=ANY),
    "packing_strategy": _SPEED,
    "eval_packing": _SPEED,
    "padding_free": _SPEED,
    "pad_to_multiple_of": _SPEED,
    "group_by_length": _SPEED,
    # batches
    "per_device_train_batch_size": Name(note=_BATCH),
    "gradient_accumulation_steps": Name(note=_BATCH),
    "steps_per_generation": Name(
        note=f"a step is generated at once and cut into optimizer steps: it is data.train_batch_size / "
        f"{_A}.ppo_mini_batch_size",
        harmless=(None,),
    ),
    "generation_batch_size": Name(
        note="data.train_batch_size counts prompts: it is generation_batch_size / num_generations", harmless=(None,)
    ),
    "per_device_eval_batch_size": Name(note=f"{_R}.max_num_seqs bounds what runs at once", harmless=ANY),
    "eval_accumulation_steps": _SPEED,
    "local_rollout_forward_batch_size": Name(note=f"{_R}.max_num_seqs bounds what runs at once", harmless=ANY),
    "batch_size": Name(
        note="it counts answers; data.train_batch_size counts prompts: batch_size / actor_rollout_ref.rollout.n"
    ),
    "mini_batch_size": Name(
        note=f"it counts answers of a forward pass; {_A}.ppo_max_token_len_per_gpu bounds that in tokens, and "
        f"{_A}.ppo_mini_batch_size counts the prompts of an optimizer step"
    ),
    "forward_batch_size": Name(note=f"{_A}.ppo_max_token_len_per_gpu bounds a micro-batch in tokens", harmless=ANY),
    "num_mini_batches": Name(
        note=f"optimizer steps a batch: data.train_batch_size / {_A}.ppo_mini_batch_size", harmless=(1,)
    ),
    # generation
    "num_generations": Name(f"{_R}.n"),
    "num_generations_eval": Name(f"{_R}.val_kwargs.n", "besides one greedy answer", harmless=(None,)),
    "rloo_k": Name(f"{_R}.n={{}} algorithm.adv_estimator=rloo"),
    "temperature": Name(f"{_R}.temperature"),
    "top_p": Name(f"{_R}.top_p"),
    "top_k": Name(f"{_R}.top_k", values={0: "-1", None: "-1"}),
    "min_p": Name(f"{_R}.min_p", values={None: "0.0"}),
    "repetition_penalty": Name(f"{_R}.repetition_penalty"),
    "stop_token": Name(note=f"a response ends with the end token, or at a text of {_R}.stop", harmless=(None, "eos")),
    "stop_token_id": Name(note=f"a response ends with the end token, or at a text of {_R}.stop", harmless=(None,)),
    "generation_kwargs": Name(note=f"its entries have keys below {_R}, as far as they are there", harmless=(None,)),
    "cache_implementation": _SPEED,
    "use_transformers_paged": _SPEED,
    "use_transformers_continuous_batching": _SPEED,
    "use_vllm": Name(note=f"vLLM is not there yet: the embedded engine generates ({_R}.name)", harmless=OFF),
    "vllm_importance_sampling_correction": Name(
        note="it corrects with sequence_mask by default",
        values={
            True: f"{_CORRECTION}.level=sequence {_CORRECTION}.mode=mask {_CORRECTION}.cap=3.0",
            False: f"{_CORRECTION}.level=null",
        },
    ),
    "vllm_importance_sampling_mode": Name(
        values={
            f"{level}_{mode}": f"{_CORRECTION}.level={level} {_CORRECTION}.mode={mode}"
            for level in ("token", "sequence")
            for mode in ("truncate", "mask")
        }
    ),
    "vllm_importance_sampling_cap": Name(f"{_CORRECTION}.cap"),
    "vllm_tensor_parallel_size": Name(note="vLLM is not there yet, and one device generates", harmless=(1,)),
    "vllm_*": _VLLM_OPTION,
    "tools": _TOOLS,
    "rollout_func": Name(note="a node of your own generates: docs/programs.md", harmless=(None,)),
    "environment_factory": _TOOLS,
    "max_tool_calling_iterations": _TOOLS,
    # the loss
    "beta": Name(
        _KL_LOSS,
        "TRL's KL stands in the loss, estimated as kl_loss_type=low_var_kl",
        values={0: f"{_A}.use_kl_loss=false"},
    ),
    "epsilon": Name(f"{_A}.clip_ratio"),
    "epsilon_low": Name(f"{_A}.clip_ratio_low"),
    "epsilon_high": Name(f"{_A}.clip_ratio_high", "clip_ratio stays the lower bound", values={None: "null"}),
    "delta": Name(f"{_A}.clip_ratio_c", "the bound of the ratio where the advantage is negative"),
    "num_iterations": Name(f"{_A}.ppo_epochs"),
    "loss_type": Name(
        note="how the losses of tokens become one number",
        values={
            "grpo": f"{_A}.loss_agg_mode=seq-mean-token-mean",
            "bnpo": f"{_A}.loss_agg_mode=token-mean",
            "dapo": f"{_A}.loss_agg_mode=token-mean",
            "dr_grpo": f"{_A}.loss_agg_mode=seq-mean-token-sum-norm",
            "cispo": f"{_A}.policy_loss=cispo {_A}.loss_agg_mode=token-mean",
            "sapo": f"{_A}.policy_loss=sapo {_A}.loss_agg_mode=seq-mean-token-mean",
        },
        harmless=("nll", "chunked_nll"),
    ),
    "importance_sampling_level": Name(
        values={"sequence": f"{_A}.policy_loss=gspo"}, note="by token is the loss vanilla", harmless=("token",)
    ),
    "sapo_temperature_pos": Name(f"{_A}.policy_loss_kwargs.tau_pos", "an option of the loss sapo"),
    "sapo_temperature_neg": Name(f"{_A}.policy_loss_kwargs.tau_neg", "an option of the loss sapo"),
    "scale_rewards": Name("algorithm.scale_rewards", values={True: "group", False: "none"}),
    "mask_truncated_completions": Name(
        note="cut-off answers count; reward.overlong.buffer_tokens is a penalty before the limit", harmless=OFF
    ),
    "top_entropy_quantile": Name(note="all tokens count", harmless=(None, 1, 1.0)),
    "off_policy_mask_threshold": Name(f"{_A}.off_policy_mask_threshold"),
    "use_bias_correction_kl": _ABSENT,
    "sync_ref_model": _MOVING_REFERENCE,
    "ref_model_mixup_alpha": Name(note="an option of sync_ref_model, which is not there", harmless=ANY),
    "ref_model_sync_steps": Name(note="an option of sync_ref_model, which is not there", harmless=ANY),
    "ref_model": Name(note="the reference is the model before the first step", harmless=(None,)),
    "completion_only_loss": Name(note="only the response is learnt: leave it out", harmless=(None, True)),
    "assistant_only_loss": Name(
        note="of a conversation (data.messages_key) only the assistant's turns are learnt: leave it out",
        harmless=(None, True),
    ),
    "neftune_noise_alpha": _ABSENT,
    "label_smoothing_factor": Name(note="nothing here does that: leave it out", harmless=(None, 0, 0.0)),
    # rewards
    "reward_funcs": Name(
        note="reward.functions name them by domain, e.g. reward.functions={default:[math,format]}; a function of your "
        "own is custom_reward_function.path, a reward model {name:model,options:{path:DIR}}"
    ),
    "reward_weights": Name(
        note="a weight stands beside the function: reward.functions={default:[math,{name:format,weight:0.2}]}",
        harmless=(None,),
    ),
    "multi_objective_aggregation": Name(
        values={"normalize_then_sum": "algorithm.adv_estimator=gdpo"}, harmless=("sum_then_normalize",)
    ),
    "reward_processing_classes": Name(note="a reward model brings its own tokenizer", harmless=(None,)),
    "reward_model": _REWARD_MODEL,
    "reward_model_path": _REWARD_MODEL,
    "value_model": Name("critic.model.path", harmless=(None,)),
    "missing_eos_penalty": Name(
        note="reward.overlong.buffer_tokens is a penalty on answers near the limit", harmless=(None,)
    ),
    # PPO
    "num_ppo_epochs": Name(f"{_A}.ppo_epochs={{}} critic.ppo_epochs={{}}"),
    "ppo_epochs": Name(f"{_A}.ppo_epochs={{}} critic.ppo_epochs={{}}"),
    "kl_coef": Name(_KL_REWARD, values={0: "algorithm.use_kl_in_reward=false"}),
    "init_kl_coef": Name(_KL_REWARD, values={0: "algorithm.use_kl_in_reward=false"}),
    "kl_estimator": Name("algorithm.kl_penalty", values={"k1": "kl", "k2": "mse", "k3": "low_var_kl"}),
    "adap_kl_ctrl": Name("algorithm.kl_ctrl.type", values={True: "adaptive", False: "fixed"}),
    "target": Name("algorithm.kl_ctrl.target_kl", "a KL per token here, of a whole response there"),
    "horizon": Name("algorithm.kl_ctrl.horizon"),
    "cliprange": Name(f"{_A}.clip_ratio"),
    "cliprange_value": Name("critic.cliprange_value"),
    "vf_coef": Name(note="the critic has an optimizer of its own: critic.optim.lr", harmless=ANY),
    "whiten_rewards": Name(
        "algorithm.reward_norm.std_level",
        "TRL whitens rewards of tokens, reward_norm scores of answers",
        values={True: "batch"},
        harmless=OFF,
    ),
    "whiten_advantages": Name(note="GAE's advantages are always whitened", harmless=(True,)),
    "gamma": Name("algorithm.gamma"),
    "lam": Name("algorithm.lam"),
    "total_episodes": Name(
        note="it counts answers; trainer.total_training_steps counts steps of data.train_batch_size × "
        "actor_rollout_ref.rollout.n answers"
    ),
    "num_sample_generations": _LOGGED,
    "early_stopping": _ABSENT,
    # optimizer
    "learning_rate": Name(f"{_OPTIM}.lr"),
    "lr_scheduler_type": Name(
        f"{_OPTIM}.scheduler",
        values={
            "linear": "linear_with_warmup",
            "cosine": "cosine_with_warmup",
            "cosine_with_min_lr": "cosine_with_warmup",
        },
    ),
    "lr_scheduler_kwargs": Name(f"{_OPTIM}.min_lr_ratio", harmless=(None, {})),
    "warmup_ratio": Name(f"{_OPTIM}.warmup_ratio"),
    "warmup_steps": Name(f"{_OPTIM}.lr_warmup_steps"),
    "weight_decay": Name(f"{_OPTIM}.weight_decay"),
    "adam_beta1": Name(f"{_OPTIM}.betas=[{{}},0.999]"),
    "adam_beta2": Name(f"{_OPTIM}.betas=[0.9,{{}}]"),
    "adam_epsilon": Name(f"{_OPTIM}.eps"),
    "max_grad_norm": Name(f"{_A}.max_grad_norm"),
    "optim": Name(
        f"{_OPTIM}.optimizer",
        values={
            **{name: "adamw" for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit")},
            **{name: "adamw_8bit" for name in ("adamw_bnb_8bit", "paged_adamw_8bit")},
        },
    ),
    "optim_args": Name(note=f"the options of the optimizer have keys below {_OPTIM}", harmless=(None,)),
    # the run
    "output_dir": Name("trainer.default_local_dir"),
    "run_name": Name("trainer.experiment_name"),
    "exp_name": Name("trainer.experiment_name"),
    "project": Name("trainer.project_name"),
    "tracker_project_name": Name("trainer.project_name"),
    "report_to": Name(
        "trainer.logger",
        values={
            "none": "[console]",
            None: "[console]",
            "all": "[console,wandb,tensorboard]",
            "wandb": "[console,wandb]",
            "tensorboard": "[console,tensorboard]",
        },
    ),
    "log_with": Name("trainer.logger", values={None: "[console]", "wandb": "[console,wandb]"}),
    "num_train_epochs": Name("trainer.total_epochs"),
    "max_steps": Name(
        "trainer.total_training_steps",
        f"TRL counts optimizer steps, of which a step here makes data.train_batch_size / {_A}.ppo_mini_batch_size",
        values={-1: "null"},
    ),
    "steps": Name("trainer.total_training_steps"),
    "seed": Name("trainer.seed={} data.seed={}"),
    "full_determinism": Name(note="on one device a run gives the same bits each time", harmless=ANY),
    "logging_*": _LOGGED,
    "log_completions": _LOGGED,
    "log_unique_prompts": _LOGGED,
    "wandb_log_unique_prompts": _LOGGED,
    "num_completions_to_print": _LOGGED,
    "log_completions_hub_repo": _HUB,
    "disable_tqdm": _LOGGED,
    "log_level*": _LOGGED,
    "eval_strategy": Name(
        values={"no": "trainer.test_freq=-1", False: "trainer.test_freq=-1"},
        note="trainer.test_freq counts steps",
        harmless=("steps",),
    ),
    "evaluation_strategy": Name(
        values={"no": "trainer.test_freq=-1", False: "trainer.test_freq=-1"},
        note="trainer.test_freq counts steps",
        harmless=("steps",),
    ),
    "eval_steps": Name("trainer.test_freq"),
    "eval_on_start": Name("trainer.val_before_train"),
    "save_strategy": Name(
        values={"no": "trainer.save_freq=-1", False: "trainer.save_freq=-1", "best": "trainer.keep_best=true"},
        note="trainer.save_freq counts steps",
        harmless=("steps",),
    ),
    "save_steps": Name("trainer.save_freq"),
    "save_total_limit": Name("trainer.keep_last", values={None: "1000"}),
    "save_only_model": Name(note="a checkpoint holds all that a run needs to go on", harmless=OFF),
    "load_best_model_at_end": Name("trainer.keep_best"),
    "metric_for_best_model": Name("trainer.keep_best_metric", "see docs/observe.md for the names of metrics"),
    "resume_from_checkpoint": Name("trainer.resume_mode", values={True: "auto", False: "never", None: "never"}),
    "overwrite_output_dir": Name(note="`distflow train --resume never` starts afresh in a used folder", harmless=OFF),
    "push_to_hub*": _HUB,
    "hub_*": _HUB,
    "callbacks": Name(note="on_step, on_validation and on_save of distflow.train: docs/python.md", harmless=(None,)),
    "do_train": Name(note="`distflow train` trains", harmless=(True,)),
    "do_eval": Name(note="data.val_files are validated every trainer.test_freq steps", harmless=(True,)),
    "use_cpu": Name(values={True: "trainer.device=cpu"}, harmless=OFF),
    "no_cuda": Name(values={True: "trainer.device=cpu"}, harmless=OFF),
    "ds3_gather_for_generation": _ONE_PROCESS_OPTION,
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "fsdp_config": _ONE_PROCESS,
    "ddp_*": _ONE_PROCESS_OPTION,
    "local_rank": _ONE_PROCESS_OPTION,
    "accelerator_config": _ONE_PROCESS_OPTION,
    "num_processes": Name("trainer.n_gpus_per_node", "with trainer.launcher=ray", harmless=(1,)),
}

DEFAULTS: tuple[tuple[str, str, str], ...] = (
    ("num_generations", "8", f"{_R}.n=8"),
    ("max_completion_length", "256", "data.max_response_length=256"),
    ("learning_rate", "1e-6", f"{_OPTIM}.lr=1e-6"),
    ("lr_scheduler_type", "linear", f"{_OPTIM}.scheduler=linear_with_warmup"),
    ("warmup_ratio", "0", f"{_OPTIM}.warmup_ratio=0"),
    ("weight_decay", "0", f"{_OPTIM}.weight_decay=0"),
    ("beta", "0.0", f"{_A}.use_kl_loss=false"),
    ("delta", "None", f"{_A}.clip_ratio_c=null"),
    ("loss_type", "dapo", f"{_A}.loss_agg_mode=token-mean"),
    ("scale_rewards", "group, 1e-4 on the standard deviation", "algorithm.adv_epsilon=1e-4"),
    ("num_train_epochs", "3", "trainer.total_epochs=3"),
    ("gradient_checkpointing", "True", f"{_M}.enable_gradient_checkpointing=true"),
    ("eval_strategy", "no", "trainer.test_freq=-1"),
    ("save_steps", "500", "trainer.save_freq=500"),
    ("seed", "42", "trainer.seed=42 data.seed=42"),
)
"""What GRPOConfig has where nothing is given, and the override that says it here: name, value there, override."""

PAGES: tuple[tuple[str, str], ...] = (
    (
        "a reward function `f(prompts, completions, **columns) -> list[float]`",
        "`f(data_source, solution_str, ground_truth, extra_info)` for one answer, or a batch as docs/rewards.md says",
    ),
    (
        "a data set whose `prompt` is a text or chat messages",
        "the same; `data.answer_key` names the column of the answer",
    ),
    (
        "`GRPOTrainer(model, reward_funcs, args, train_dataset).train()`",
        "`distflow train grpo ...`, or [`distflow.train`](python.md) with `data=` and `reward=` from Python",
    ),
    ("`SFTTrainer(...).train()`, `trl sft`", '`distflow sft ...`, or `distflow.train("sft", ..., data=rows)`'),
    (
        "an SFT data set with `messages`",
        "the same; of a conversation [the assistant's turns](training.md#conversations) are learnt",
    ),
    (
        "an SFT data set with `prompt` and `completion`",
        "the same with `data.response_key=completion`",
    ),
    ("the columns `tools` and `chat_template_kwargs`", "the same: the chat template is handed both"),
    (
        "`TrainerCallback`",
        "`on_step`, `on_validation`, `on_save` of [`distflow.train`](python.md#callbacks)",
    ),
    ("`GRPOTrainer(...).evaluate()`", "`distflow eval RUN`"),
    ("`trl vllm-serve`, `accelerate launch`", "one process so far"),
)
"""What is no key: there, here."""
