"""Keys of other systems, and what says the same here. None of them is accepted."""

_TOKENS = "micro-batches are bounded by tokens: actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_ENGINE = "the embedded engine needs no such limit; actor_rollout_ref.rollout.max_num_seqs bounds what runs at once"
_LOSS_OPTIONS = "actor_rollout_ref.actor.policy_loss_kwargs"
_GREEDY = "actor_rollout_ref.rollout.val_kwargs.greedy"

REPLACED: dict[str, str] = {
    "hydra": "Hydra only composes here; the folder of the run is trainer.default_local_dir",
    "actor_rollout_ref.rollout.mode": "engines are always asynchronous; how far they run ahead is async.max_staleness",
    "actor_rollout_ref.rollout.response_length": "it is data.max_response_length",
    "actor_rollout_ref.rollout.prompt_length": "it is data.max_prompt_length",
    "actor_rollout_ref.rollout.dtype": "it is actor_rollout_ref.model.dtype",
    "actor_rollout_ref.rollout.gpu_memory_utilization": _ENGINE,
    "actor_rollout_ref.rollout.max_num_batched_tokens": _ENGINE,
    "actor_rollout_ref.rollout.do_sample": f"training always samples; validation has {_GREEDY}",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": f"it is {_GREEDY}, the other way round",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _TOKENS,
    "actor_rollout_ref.rollout.calculate_log_probs": "log-probs always come with the tokens",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (
        "micro-batches are bounded by tokens: actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": _TOKENS,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _TOKENS,
    "actor_rollout_ref.actor.use_dynamic_bsz": f"always so; {_TOKENS}",
    "actor_rollout_ref.actor.grad_clip": "it is actor_rollout_ref.actor.max_grad_norm",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "it is actor_rollout_ref.actor.policy_loss",
    **{
        f"actor_rollout_ref.actor.{old}": f"an option of the loss: {_LOSS_OPTIONS}.{old.removeprefix('policy_loss.')}"
        for old in (
            *("policy_drift_coeff", "rejection_sampling", "policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb"),
            *("policy_loss.clip_cov_ub", "policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
        )
    },
    "algorithm.rollout_correction.rollout_is": "it is algorithm.rollout_correction.level",
    "algorithm.rollout_correction.rollout_is_threshold": (
        "it is algorithm.rollout_correction.cap, for a band with mode=mask and floor"
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "it is actor_rollout_ref.actor.optim.warmup_ratio",
    "actor_rollout_ref.actor.optim.warmup_style": "it is actor_rollout_ref.actor.optim.scheduler",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "it is actor_rollout_ref.actor.optim.scheduler",
    "actor_rollout_ref.model.use_remove_padding": "sequences are always packed without padding",
    "algorithm.gdpo_reward_keys": "the parts of a reward are its functions: reward.functions",
    "algorithm.gdpo_reward_weights": "they are the weights of reward.functions",
    "algorithm.norm_adv_by_std": "it is algorithm.norm_adv_by_std_in_grpo",
    "data.reward_fn_key": "it is data.domain_key",
    "data.dataloader_num_workers": "it is data.num_loader_workers",
    "data.gen_batch_size": "dropped groups are replaced one by one; data.train_batch_size is what a step consumes",
    "reward_model.reward_manager": "reward functions are named by domain: reward.functions",
    "reward_model.overlong_buffer.len": "it is reward.overlong.buffer_tokens",
    "reward_model.overlong_buffer.penalty_factor": "it is reward.overlong.factor",
    "async.max_head_offpolicyness": "it is async.max_staleness",
    "async.use_decoupled_loss": "it is actor_rollout_ref.actor.policy_loss=decoupled",
    "async.behav_imp_weight_cap": "it is an option of the decoupled loss: actor_rollout_ref.actor.policy_loss_kwargs",
    "async.recompute_logprob": "the trainer's own old log-probs are always computed",
    "async.consumer_batch_size": "it is data.train_batch_size",
    "trainer.max_actor_ckpt_to_keep": "it is trainer.keep_last",
}
