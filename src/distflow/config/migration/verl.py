"""verl's keys, as of `verl/trainer/config/_generated_ppo_trainer.yaml` of early 2026, and some of older examples. Keys
that both have are not listed.

Read in verl-project/verl at 1a7e2ca (the whole config), 418de7a (`reward/reward.yaml`), 2dd0a55 (rollout correction).
"""

from distflow.config.migration.names import ANY, OFF, Name

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"

_TOKENS = Name(
    note=f"micro-batches are bounded by tokens ({_A}.ppo_max_token_len_per_gpu): that bounds memory, and changes "
    "nothing that is trained",
    harmless=ANY,
)
_ENGINE = Name(note=f"the embedded engine has no such option; {_R}.max_num_seqs bounds what runs at once", harmless=ANY)
_SPEED = Name(note="it changes speed and memory, not what is trained", harmless=ANY)
_NO_OFFLOAD = Name(note="fsdp_config of actor, critic and reference says what is offloaded: leave it out", harmless=OFF)
_ONE_DEVICE = Name(note="one device so far: leave it out", harmless=(None, 1, -1))
_RAY = Name(note="there is no Ray here", harmless=ANY)
_TRACES = Name(note="traces of kernels are not there yet", harmless=OFF)
_PACKED = Name(note="sequences are always packed without padding", harmless=ANY)
_WRAPPING = Name(note="weights that are sharded are gathered layer by layer, as the model names them", harmless=ANY)
_REWARD_MODEL = Name(
    note="a reward model is a reward function, with its path among the options: "
    "reward.functions={default:[{name:model,options:{path:DIR}}]}; as many others may stand beside it",
    harmless=OFF,
)
_OF_REWARD_MODEL = Name(note="what a reward model needs are options of its reward function", harmless=ANY)
_ONE_TURN = Name(note="conversations of several turns are not there yet", harmless=OFF)
_ONE_TURN_OPTION = Name(note="it shapes conversations of several turns, which are not there yet", harmless=ANY)
_SYNC_STEP = Name(
    note="weights are published after each step: data.train_batch_size is ppo_mini_batch_size × require_batches × "
    "trigger_parameter_sync_step",
    harmless=(1,),
)
_HYDRA = Name(note="Hydra only composes here; the folder of the run is trainer.default_local_dir")
_SAMPLES = Name(note="the samples of every step are kept in the run's folder, and shown in its report", harmless=ANY)
_MANAGER = Name(
    note="reward functions are named by domain: reward.functions, judged side by side, and the dapo manager's penalty "
    "is reward.overlong",
    harmless=(None, "naive", "parallel", "dapo", "batch", "prime"),
)
_OVERLONG = {
    "enable": Name(note="on where reward.overlong.buffer_tokens is above 0", harmless=(True,)),
    "len": Name("reward.overlong.buffer_tokens"),
    "penalty_factor": Name("reward.overlong.factor"),
    "log": Name(note="the penalty is always recorded as a part of the reward", harmless=ANY),
}


def _optimizer(group: str, owner: str) -> dict[str, Name]:
    return {
        f"{group}.lr_warmup_steps_ratio": Name(f"{group}.warmup_ratio"),
        f"{group}.warmup_style": _scheduler(group),
        f"{group}.lr_scheduler_type": _scheduler(group),
        f"{group}.clip_grad": Name(f"{owner}.max_grad_norm"),
        f"{group}.total_training_steps": Name(note="the run knows it", harmless=ANY),
        f"{group}.num_cycles": Name(note="a cosine falls once, over half a period", harmless=(0.5,)),
        f"{group}.optimizer_impl": Name(f"{group}.optimizer", harmless=("torch.optim",)),
        f"{group}.override_optimizer_config": Name(note="nothing here does that: leave it out", harmless=(None,)),
    }


def _scheduler(group: str) -> Name:
    """verl's constant rate warms up if it is told to, as ours by the longer name."""
    return Name(
        f"{group}.scheduler",
        values={"constant": "constant_with_warmup", "cosine": "cosine_with_warmup"},
        harmless=(None,),
    )


NAMES: dict[str, Name] = {
    # the policy
    **_optimizer(f"{_A}.optim", _A),
    f"{_A}.grad_clip": Name(f"{_A}.max_grad_norm"),
    f"{_A}.entropy_coeff": Name(f"{_A}.entropy_coef"),
    f"{_A}.policy_loss.loss_mode": Name(f"{_A}.policy_loss", values={"geo_mean": "gmpo"}),
    **{
        f"{_A}.policy_loss.{name}": Name(f"{_A}.policy_loss_kwargs.{name}", "an option of that loss")
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
    f"{_A}.tau_pos": Name(f"{_A}.policy_loss_kwargs.tau_pos", "an option of the loss sapo"),
    f"{_A}.tau_neg": Name(f"{_A}.policy_loss_kwargs.tau_neg", "an option of the loss sapo"),
    f"{_A}.rejection_sampling": Name(f"{_A}.policy_loss_kwargs.rejection_sampling", "an option of the loss decoupled"),
    f"{_A}.use_token_level_loss": Name(
        values={True: f"{_A}.loss_agg_mode=token-mean", False: f"{_A}.loss_agg_mode=seq-mean-token-mean"}
    ),
    f"{_A}.tis_imp_ratio_cap": Name(f"{_CORRECTION}.level=token {_CORRECTION}.cap={{}}", harmless=(None, -1)),
    f"{_A}.shuffle": Name(note="mini-batches are drawn anew in each pass, by trainer.seed", harmless=(True,)),
    "critic.shuffle": Name(note="mini-batches are drawn anew in each pass, by trainer.seed", harmless=(True,)),
    "*.data_loader_seed": Name(note="mini-batches are drawn by trainer.seed", harmless=ANY),
    f"{_A}.calculate_entropy": Name(note="the entropy is always measured", harmless=ANY),
    f"{_A}.freeze_vision_tower": Name(note="there are only texts", harmless=ANY),
    f"{_A}.use_prefix_grouper": _SPEED,
    "*.use_torch_compile": _SPEED,
    "*.use_fused_kernels": _SPEED,
    "*.fused_kernel_options.*": _SPEED,
    "*.entropy_from_logits_with_chunking": _SPEED,
    "*.entropy_checkpointing": _SPEED,
    "*.use_dynamic_bsz": _TOKENS,
    "*.log_prob_use_dynamic_bsz": _TOKENS,
    "*.ppo_micro_batch_size": _TOKENS,
    "*.ppo_micro_batch_size_per_gpu": _TOKENS,
    "*.log_prob_micro_batch_size": _TOKENS,
    "*.log_prob_micro_batch_size_per_gpu": _TOKENS,
    "*.forward_micro_batch_size": _TOKENS,
    "*.forward_micro_batch_size_per_gpu": _TOKENS,
    "critic.forward_max_token_len_per_gpu": _TOKENS,
    f"{_R}.log_prob_max_token_len_per_gpu": _TOKENS,
    "data.micro_batch_size": _TOKENS,
    "data.micro_batch_size_per_gpu": _TOKENS,
    "*.ulysses_sequence_parallel_size": _ONE_DEVICE,
    "*.use_remove_padding": _PACKED,
    "*.checkpoint.async_save": Name(note="checkpoints are written before the next step starts", harmless=OFF),
    "*.checkpoint.*": Name(
        note="a checkpoint always holds model, optimizer and all else; `distflow export` writes a Hugging Face folder",
        harmless=ANY,
    ),
    "*.router_replay.mode": Name(note="there is no router to replay", harmless=(None, "disabled")),
    # sharding
    **{
        f"critic.{group}.{name}": Name(f"critic.fsdp_config.{name}", harmless=OFF)
        for group in ("model.fsdp_config", "fsdp")
        for name in ("param_offload", "optimizer_offload", "offload_policy")
    },
    "actor_rollout_ref.ref.fsdp_config.offload_policy": Name(
        "actor_rollout_ref.ref.fsdp_config.param_offload", harmless=OFF
    ),
    "*_offload": _NO_OFFLOAD,
    "*.offload_policy": _NO_OFFLOAD,
    "*.fsdp_size": Name(
        note=f"critic and reference lie over ranks as the actor does: {_A}.fsdp_config.fsdp_size", harmless=(None, -1)
    ),
    "*.model_dtype": Name(note="weights are kept in float32", harmless=(None, "fp32", "float32")),
    "*.fsdp_config.dtype": Name(f"{_M}.dtype"),
    "*.full_determinism": Name(note="on one device a run gives the same bits each time", harmless=ANY),
    "*.megatron.*": Name(note="Megatron is not there yet"),
    "*.fsdp_config.*": _WRAPPING,
    "*.fsdp.*": _WRAPPING,
    "*.wrap_policy.*": _WRAPPING,
    "actor_rollout_ref.ref.strategy": Name(f"{_A}.strategy", "one train engine computes both", values={}),
    "actor_rollout_ref.ref.model": Name(note="the reference is the model before the first step", harmless=(None,)),
    "actor_rollout_ref.hybrid_engine": Name(note="one process trains and generates", harmless=(True,)),
    "actor_rollout_ref.nccl_timeout": Name("trainer.peers_timeout_s"),
    # generation ahead of training: fully_async_policy, one_step_off_policy
    "async_training.staleness_threshold": Name(
        note="a share of stale samples there, whole steps here: async.max_staleness is it rounded up",
        harmless=(0, 0.0),
    ),
    "async_training.trigger_parameter_sync_step": _SYNC_STEP,
    "async_training.require_batches": _SYNC_STEP,
    "async_training.partial_rollout": Name(
        note=f"running answers never hold up new weights; {_R}.kv_on_update says how they go on",
        values={True: f"{_R}.kv_on_update=recompute"},
    ),
    "async_training.use_rollout_log_probs": Name(
        note=f"{_A}.policy_loss=decoupled takes them as the behaviour policy's", harmless=OFF
    ),
    "async_training.compute_prox_log_prob": Name(values={True: f"{_A}.policy_loss=decoupled"}, harmless=OFF),
    "rollout.test_freq": Name("trainer.test_freq", "in steps"),
    "rollout.total_epochs": Name("trainer.total_epochs"),
    "rollout.total_rollout_steps": Name(
        note="prompts in all: trainer.total_training_steps is total_rollout_steps / data.train_batch_size"
    ),
    "rollout.nnodes": Name(note="one machine so far", harmless=(1,)),
    "rollout.n_gpus_per_node": Name(note="one device so far", harmless=(1,)),
    # the rollout
    f"{_R}.mode": Name(
        note="engines are always asynchronous; how far they run ahead is async.max_staleness", harmless=ANY
    ),
    f"{_R}.prompt_length": Name("data.max_prompt_length"),
    f"{_R}.response_length": Name("data.max_response_length"),
    f"{_R}.dtype": Name(f"{_M}.dtype"),
    f"{_R}.do_sample": Name(note=f"training always samples; validation has {_R}.val_kwargs.greedy", harmless=(True,)),
    f"{_R}.val_kwargs.do_sample": Name(
        f"{_R}.val_kwargs.greedy",
        f"{_R}.val_kwargs.n counts sampled answers besides the greedy one",
        values={True: "false", False: "true"},
    ),
    f"{_R}.calculate_log_probs": Name(note="log-probs always come with the tokens", harmless=ANY),
    f"{_R}.logprobs_mode": Name(
        note="log-probs are those of softmax(logits / temperature)", harmless=("processed_logprobs",)
    ),
    f"{_R}.ignore_eos": Name(note="a response ends with the end token", harmless=OFF),
    f"{_R}.data_parallel_size": _ONE_DEVICE,
    f"{_R}.expert_parallel_size": _ONE_DEVICE,
    f"{_R}.pipeline_model_parallel_size": _ONE_DEVICE,
    f"{_R}.over_sample_rate": Name(
        note="it leaves the slowest answers out of the step; algorithm.filter_groups.oversampling asks more prompts "
        "than the step takes, and those that it ends again in a later one",
        harmless=(None, 0),
    ),
    f"{_R}.max_model_len": Name(
        note="the longest sample is data.max_prompt_length + data.max_response_length", harmless=ANY
    ),
    f"{_R}.skip_rollout": Name(note="nothing here does that: leave it out", harmless=OFF),
    f"{_R}.use_fire_sampling": Name(note="nothing here does that: leave it out", harmless=OFF),
    f"{_R}.quantization": Name(note="weights are not quantised for the rollout", harmless=(None,)),
    f"{_R}.chat_scheduler": _ONE_TURN,
    f"{_R}.multi_turn.enable": _ONE_TURN,
    f"{_R}.multi_turn.tool_config_path": _ONE_TURN,
    f"{_R}.multi_turn.interaction_config_path": _ONE_TURN,
    f"{_R}.multi_turn.*": _ONE_TURN_OPTION,
    f"{_R}.agent.default_agent_loop": Name(
        note="conversations of several turns are not there yet", harmless=(None, "single_turn_agent")
    ),
    f"{_R}.agent.agent_loop_config_path": _ONE_TURN,
    f"{_R}.agent.custom_async_server.*": _ONE_TURN,
    f"{_R}.agent.*": _ONE_TURN_OPTION,
    f"{_R}.trace.backend": _TRACES,
    f"{_R}.prometheus.enable": Name(note="metrics are in the run's folder and its trackers", harmless=OFF),
    **{
        f"{_R}.{name}": _ENGINE
        for name in (
            *("gpu_memory_utilization", "max_num_batched_tokens", "cudagraph_capture_sizes"),
            *("free_cache_engine", "enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy"),
            *("load_format", "disable_log_stats", "multi_stage_wake_up", "engine_kwargs*", "swap_space"),
            *("checkpoint_engine.*", "update_weights_bucket_megabytes", "skip_dump_dir", "skip_tokenizer_init"),
            *("layered_summon", "cast_to_rollout_dtype"),
        )
    },
    # models
    f"{_M}.hf_config_path": Name(note="the config is the one in the model's folder", harmless=(None,)),
    f"{_M}.custom_chat_template": Name(note="the template is the tokenizer's", harmless=(None,)),
    f"{_M}.exclude_modules": Name(f"{_M}.target_modules", "it lists what gets an adapter", harmless=(None,)),
    f"{_M}.lora_adapter_path": Name(note="adapters start fresh", harmless=(None,)),
    f"{_M}.override_config.*dropout": Name(note="pretrained decoders drop nothing", harmless=(0, 0.0)),
    f"{_M}.override_config.*pdrop": Name(note="pretrained decoders drop nothing", harmless=(0, 0.0)),
    f"{_M}.override_config.*": Name(note="change config.json in the model's folder", harmless=(None,)),
    "*.model.external_lib": Name("trainer.imports", harmless=(None,)),
    "*.use_shm": _SPEED,
    "*.use_liger": _SPEED,
    "*.tiled_mlp.*": _SPEED,
    "*.mtp.*": Name(note="heads that predict several tokens are not there", harmless=OFF),
    # the critic
    **_optimizer("critic.optim", "critic"),
    "critic.grad_clip": Name("critic.max_grad_norm"),
    "critic.rollout_n": Name(f"{_R}.n"),
    "critic.strategy": Name(f"{_A}.strategy", "one train engine updates both"),
    "critic.enable": Name(note="the program decides: dag.pipeline=ppo has a critic", harmless=(None,)),
    "critic.model.tokenizer_path": Name(f"{_M}.tokenizer_path"),
    "critic.model.trust_remote_code": Name(f"{_M}.trust_remote_code", harmless=OFF),
    "critic.model.enable_gradient_checkpointing": Name(
        note=f"it goes with the actor's {_M}.enable_gradient_checkpointing", harmless=ANY
    ),
    "critic.model.lora_rank": Name(note="all weights of the critic are trained", harmless=(None, 0)),
    "critic.model.lora_alpha": Name(note="all weights of the critic are trained", harmless=ANY),
    "critic.model.target_modules": Name(note="all weights of the critic are trained", harmless=ANY),
    "critic.model.override_config.*": Name(note="change config.json in the model's folder", harmless=(None,)),
    # data
    "data.tokenizer": Name(f"{_M}.tokenizer_path", harmless=(None,)),
    "data.reward_fn_key": Name("data.domain_key"),
    "data.val_batch_size": Name(note="validation answers all rows", harmless=ANY),
    "data.gen_batch_size": Name(
        note="dropped groups are replaced one by one; data.train_batch_size is what a step consumes", harmless=ANY
    ),
    "data.dataloader_num_workers": Name("data.num_loader_workers"),
    "data.filter_overlong_prompts_workers": Name(note="data.num_loader_workers tokenise the prompts", harmless=ANY),
    "data.return_raw_input_ids": Name(note="nothing reads it here", harmless=ANY),
    "data.return_raw_chat": Name(note="nothing reads it here", harmless=ANY),
    "data.return_full_prompt": Name(note="nothing reads it here", harmless=ANY),
    "data.return_multi_modal_inputs": Name(note="there are only texts", harmless=ANY),
    "data.validation_shuffle": Name(note="validation answers all rows", harmless=ANY),
    "data.image_key": Name(note="there are only texts so far", harmless=(None, "images")),
    "data.video_key": Name(note="there are only texts so far", harmless=(None, "videos")),
    "data.image_patch_size": Name(note="there are only texts so far", harmless=ANY),
    "data.trust_remote_code": Name(f"{_M}.trust_remote_code", harmless=OFF),
    "data.tool_config_path": _ONE_TURN,
    "data.custom_cls.*": Name(note="rows are read as docs/data.md says", harmless=(None,)),
    "data.sampler.*": Name(note="rows come in the order of data.shuffle and data.seed", harmless=(None,)),
    "data.datagen.*": Name(note="rows are read from data.train_files", harmless=(None,)),
    # supervised fine-tuning
    "model.partial_pretrain": Name(f"{_M}.path"),
    "data.max_length": Name(
        note="prompt and response have a limit each: data.max_prompt_length, data.max_response_length"
    ),
    "data.multiturn.enable": Name(note="conversations are known by their column: data.messages_key", harmless=ANY),
    "data.multiturn.messages_key": Name("data.messages_key"),
    "data.multiturn.tools_key": Name("data.tools_key"),
    "data.multiturn.enable_thinking_key": Name(
        note="a row's column chat_template_kwargs holds what its template is handed, e.g. enable_thinking"
    ),
    "data.prompt_dict_keys": Name("data.prompt_key", "a dotted name reaches into nested values"),
    "data.response_dict_keys": Name("data.response_key", "a dotted name reaches into nested values"),
    "engine": Name(f"{_A}.strategy", "the train engine is torch"),
    "use_remove_padding": _PACKED,
    "ulysses_sequence_parallel_size": _ONE_DEVICE,
    # rewards
    "reward_model.reward_manager": _MANAGER,
    "reward_manager.name": _MANAGER,
    "reward.reward_manager.name": _MANAGER,
    "*reward_manager.source": Name(
        note="reward functions are named by domain: reward.functions", harmless=("register",)
    ),
    "reward.custom_reward_function.path": Name("custom_reward_function.path"),
    "reward.custom_reward_function.name": Name("custom_reward_function.name"),
    "*custom_reward_function.reward_kwargs*": Name(note="give the function's parameters defaults"),
    **{
        f"{group}.{name}": meaning
        for group in ("*overlong_buffer_cfg", "reward_model.overlong_buffer", "custom_reward_function.overlong_buffer")
        for name, meaning in _OVERLONG.items()
    },
    "*reward_kwargs.max_resp_len": Name("data.max_response_length"),
    "*.sandbox_fusion.url": Name(
        note="programs run on this machine, or where `distflow sandbox serve` runs: reward.functions={default: [{name: "
        "code, options: {sandbox: URL}}]}",
        harmless=(None,),
    ),
    "*.sandbox_fusion.*": Name(note="what a program may use is settled: docs/sandbox.md", harmless=ANY),
    "reward_model.launch_reward_fn_async": Name(note="answers are always judged while others are made", harmless=ANY),
    "reward_model.num_workers": Name("reward.num_workers"),
    "reward_model.enable": _REWARD_MODEL,
    "reward.reward_model.enable": _REWARD_MODEL,
    "reward_model.enable_resource_pool": Name(note="a reward model's option `device` says where it is", harmless=OFF),
    "reward.reward_model.*": _OF_REWARD_MODEL,
    "reward_model.*": _OF_REWARD_MODEL,
    # the algorithm
    f"{_CORRECTION}.rollout_is": Name(f"{_CORRECTION}.level", harmless=(None,)),
    f"{_CORRECTION}.rollout_is_threshold": Name(
        f"{_CORRECTION}.cap", f"for a band, {_CORRECTION}.mode=mask and {_CORRECTION}.floor"
    ),
    f"{_CORRECTION}.rollout_rs_threshold_lower": Name(
        note=f"the lower bound stands in {_CORRECTION}.rollout_rs_threshold", harmless=(None,)
    ),
    f"{_CORRECTION}.rollout_token_veto_threshold": Name(
        note=f"a bound of single tokens: {_CORRECTION}.rollout_rs=token_k1", harmless=(None,)
    ),
    f"{_CORRECTION}.bypass_mode": Name(note="the trainer's old log-probs are always computed", harmless=OFF),
    f"{_CORRECTION}.loss_type": Name(note="it belongs to bypass_mode", harmless=(None, "ppo_clip")),
    "algorithm.gdpo_reward_keys": Name(note="the parts of a reward are its functions: reward.functions"),
    "algorithm.gdpo_reward_weights": Name(note="they are the weights of reward.functions"),
    "algorithm.norm_adv_by_std": Name("algorithm.norm_adv_by_std_in_grpo"),
    "algorithm.use_pf_ppo": Name(note="nothing here does that: leave it out", harmless=OFF),
    "algorithm.pf_ppo*": Name(note="an option of use_pf_ppo, which is not there", harmless=ANY),
    # the run
    "trainer.max_actor_ckpt_to_keep": Name("trainer.keep_last", values={None: "1000"}),
    "trainer.max_critic_ckpt_to_keep": Name(note="it goes with the actor's: trainer.keep_last", harmless=ANY),
    "trainer.resume_from_path": Name("trainer.resume_mode", harmless=OFF),
    "trainer.balance_batch": Name(note="there is one device to balance over", harmless=ANY),
    "trainer.log_val_generations": _SAMPLES,
    "trainer.rollout_data_dir": _SAMPLES,
    "trainer.validation_data_dir": _SAMPLES,
    "trainer.val_only": Name(note="`distflow eval` only validates", harmless=OFF),
    "trainer.default_hdfs_dir": Name(note="checkpoints lie in trainer.default_local_dir", harmless=(None,)),
    "trainer.del_local_ckpt_after_load": Name(note="a checkpoint stays when it was read", harmless=OFF),
    "trainer.esi_redundant_time": Name(note="nothing here does that: leave it out", harmless=(None, 0)),
    "trainer.ray_wait_register_center_timeout": _RAY,
    "trainer.use_legacy_worker_impl": _RAY,
    "ray_init*": _RAY,
    "ray_kwargs*": _RAY,
    "transfer_queue.enable": Name(note="there is no transfer queue", harmless=OFF),
    "*.profiler.enable": _TRACES,
    "*.profiler.tool": _TRACES,
    "global_profiler.tool": _TRACES,
    "global_profiler.steps": _TRACES,
    "*.profiler.*": Name(note="traces of kernels are not there yet, so that it does nothing", harmless=ANY),
    "global_profiler.*": Name(note="traces of kernels are not there yet, so that it does nothing", harmless=ANY),
    "hydra": _HYDRA,
    "hydra.*": _HYDRA,
    "*._target_": Name(note="it names a class of verl", harmless=ANY),
}

VALUES: dict[str, dict[object, str]] = {
    f"{_A}.kl_loss_type": {"k1": "kl", "k2": "mse", "k3": "low_var_kl"},
    "algorithm.kl_penalty": {"k1": "kl", "k2": "mse", "k3": "low_var_kl"},
    f"{_A}.optim.scheduler": {"cosine": "cosine_with_warmup"},
}
"""Values of keys that both have, under the name that they have here."""

PAGES: tuple[tuple[str, str], ...] = (
    (
        "the trainers `one_step_off_policy` and `fully_async_policy`",
        "the same programs with `async.max_staleness` above 0: [asynchrony](async.md)",
    ),
    (
        "the parquet columns `prompt` (chat messages), `data_source`, `reward_model.ground_truth`, `extra_info`",
        "the same; `data.answer_key=reward_model.ground_truth`, as the presets `verl_grpo` and `verl_ppo` have it",
    ),
    ("`compute_score(data_source, solution_str, ground_truth, extra_info)`", "the same function, as `custom`"),
    (
        "a grader by `data_source`, chosen in `default_compute_score`",
        "`reward.functions`, by the same column; `math` also takes what follows `####`",
    ),
    ("the adaptive controller's mean of sequence means", "`algorithm.kl_ctrl.mean=sequence`"),
    ("`trainer.default_local_dir` holds checkpoints", "it is the run's whole folder"),
    ("`RayPPOTrainer.fit`", "a [program](programs.md), and `Worker.training_loop`"),
    ("`DataProto`", "`Batch`: per-token columns flat, padded when asked for"),
)
"""What is no key: there, here."""
