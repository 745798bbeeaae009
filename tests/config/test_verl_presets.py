"""The presets `verl_grpo` and `verl_ppo` against verl's own YAML."""

import pytest
import yaml

from distflow.config import load_config
from distflow.config.keys.schema import flatten, schema_keys
from distflow.config.migration.tables import find_names

# verl/trainer/config/_generated_ppo_trainer.yaml of verl-project/verl at 1a7e2ca, but for files,
# engines, devices, profilers and placement.
VERL = """
actor_rollout_ref:
  actor:
    optim:
      optimizer: AdamW
      optimizer_impl: torch.optim
      lr: 1.0e-06
      lr_warmup_steps_ratio: 0.0
      total_training_steps: -1
      weight_decay: 0.01
      lr_warmup_steps: -1
      betas: [0.9, 0.999]
      clip_grad: 1.0
      min_lr_ratio: 0.0
      num_cycles: 0.5
      lr_scheduler_type: constant
      warmup_style: null
      override_optimizer_config: null
    fsdp_config:
      param_offload: false
      optimizer_offload: false
      offload_policy: false
      reshard_after_forward: true
      fsdp_size: -1
      model_dtype: fp32
      ulysses_sequence_parallel_size: 1
      dtype: bfloat16
    ppo_mini_batch_size: 256
    ppo_micro_batch_size: null
    ppo_micro_batch_size_per_gpu: null
    use_dynamic_bsz: false
    ppo_max_token_len_per_gpu: 16384
    clip_ratio: 0.2
    clip_ratio_low: 0.2
    clip_ratio_high: 0.2
    freeze_vision_tower: false
    policy_loss:
      loss_mode: vanilla
    clip_ratio_c: 3.0
    loss_agg_mode: token-mean
    loss_scale_factor: null
    entropy_coeff: 0
    calculate_entropy: false
    use_kl_loss: false
    use_prefix_grouper: false
    use_torch_compile: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    ppo_epochs: 1
    data_loader_seed: 42
    grad_clip: 1.0
    use_remove_padding: true
  ref:
    log_prob_micro_batch_size_per_gpu: null
    router_replay:
      mode: disabled
  rollout:
    mode: async
    temperature: 1.0
    top_k: -1
    top_p: 1
    prompt_length: 512
    response_length: 512
    dtype: bfloat16
    gpu_memory_utilization: 0.5
    ignore_eos: false
    enforce_eager: false
    free_cache_engine: true
    data_parallel_size: 1
    max_num_batched_tokens: 8192
    max_model_len: null
    max_num_seqs: 1024
    enable_chunked_prefill: true
    logprobs_mode: processed_logprobs
    load_format: dummy
    do_sample: true
    n: 1
    over_sample_rate: 0
    val_kwargs:
      top_k: -1
      top_p: 1.0
      do_sample: false
    multi_turn:
      enable: false
      format: hermes
    calculate_log_probs: false
    agent:
      num_workers: 8
      default_agent_loop: single_turn_agent
    quantization: null
  model:
    tokenizer_path: null
    trust_remote_code: false
    custom_chat_template: null
    external_lib: null
    enable_gradient_checkpointing: true
    use_remove_padding: true
    lora_rank: 0
    lora_alpha: 16
    target_modules: all-linear
    exclude_modules: null
    use_liger: false
  hybrid_engine: true
data:
  tokenizer: null
  train_max_samples: -1
  val_max_samples: -1
  prompt_key: prompt
  reward_fn_key: data_source
  max_prompt_length: 512
  max_response_length: 512
  train_batch_size: 1024
  val_batch_size: null
  return_raw_chat: true
  shuffle: true
  image_key: images
  filter_overlong_prompts: false
  truncation: error
reward_model:
  enable: false
  reward_manager: naive
algorithm:
  rollout_correction:
    rollout_is: null
    rollout_is_threshold: 2.0
    bypass_mode: false
    loss_type: ppo_clip
    rollout_is_batch_normalize: false
  gamma: 1.0
  lam: 1.0
  norm_adv_by_std_in_grpo: true
  use_kl_in_reward: false
  kl_penalty: kl
  kl_ctrl:
    type: fixed
    kl_coef: 0.001
  use_pf_ppo: false
custom_reward_function:
  path: null
  name: compute_score
trainer:
  balance_batch: true
  total_epochs: 30
  total_training_steps: null
  project_name: verl_examples
  experiment_name: gsm8k
  nnodes: 1
  save_freq: -1
  esi_redundant_time: 0
  resume_mode: auto
  resume_from_path: null
  val_before_train: true
  val_only: false
  test_freq: -1
  critic_warmup: 0
  default_hdfs_dir: null
  max_actor_ckpt_to_keep: null
  use_legacy_worker_impl: auto
"""

CRITIC = """
critic:
  optim:
    optimizer: AdamW
    lr: 1.0e-05
    lr_warmup_steps_ratio: 0.0
    weight_decay: 0.01
    lr_warmup_steps: -1
    betas: [0.9, 0.999]
    clip_grad: 1.0
    min_lr_ratio: 0.0
    lr_scheduler_type: constant
  model:
    lora_rank: 0
    enable_gradient_checkpointing: true
  rollout_n: 1
  ppo_mini_batch_size: 256
  ppo_max_token_len_per_gpu: 32768
  forward_max_token_len_per_gpu: 32768
  ppo_epochs: 1
  cliprange_value: 0.5
  loss_agg_mode: token-mean
  grad_clip: 1.0
"""


def leaves(values, prefix=""):
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def check(config, text):
    """Each leaf of verl's is the same key with the same value, or says what is so here, or asks for
    nothing."""
    ours = flatten(config)
    unlike = []
    for key, value in leaves(yaml.safe_load(text)):
        if key in schema_keys():
            if key == "critic.ppo_mini_batch_size":  # verl's is the actor's by reference
                value = None
            same = ours[key] == (tuple(value) if isinstance(value, list) else value)
            unlike += [] if same or str(value).lower() == ours[key] else [(key, value, ours[key])]
            continue

        name = find_names(key)["verl"]
        for override in name.overrides(value).split(" ") if not name.accepts(value) else []:
            here, _, wanted = override.partition("=")
            unlike += [] if ours[here] == yaml.safe_load(wanted) else [(key, override, ours[here])]

    assert not unlike


@pytest.mark.parametrize(("preset", "text"), [("verl_grpo", VERL), ("verl_ppo", VERL + CRITIC)])
def test_a_preset_has_verls_defaults(preset, text):
    config = load_config(preset, complete=False).config
    check(config, text)
    assert config.data.answer_key == "reward_model.ground_truth"


def test_verls_references_are_followed():
    overrides = [
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
    ]
    critic = load_config("verl_ppo", overrides, complete=False).config.critic
    assert (critic.ppo_epochs, critic.loss_agg_mode) == (2, "seq-mean-token-sum")


def test_verls_whole_yaml_is_answered_as_its_commands_are(tmp_path):
    """Its own file on top of the preset asks for nothing else, but for two values that are written
    otherwise."""
    theirs = VERL.replace("AdamW", "adamw").replace(
        "    policy_loss:\n      loss_mode: vanilla\n", ""
    )
    (tmp_path / "theirs.yaml").write_text("defaults: [verl_grpo, _self_]\n" + theirs)
    loaded = load_config(str(tmp_path / "theirs.yaml"), complete=False)
    assert loaded.config == load_config("verl_grpo", complete=False).config
    assert len(loaded.notes) > 50
