"""DAPO: clip-higher, token mean, dynamic sampling, a penalty on overlong responses, no KL."""

PAPER = "Yu et al. 2025, arXiv:2503.14476"
SETTINGS = """
defaults: [grpo, _self_]
dag: {pipeline: dapo}
algorithm:
  filter_groups: {enable: true}  # section 3.2
actor_rollout_ref:
  actor:
    clip_ratio_low: 0.2  # section 4.1
    clip_ratio_high: 0.28
    loss_agg_mode: token-mean  # section 3.3
    use_kl_loss: false  # section 2.3
  rollout: {n: 16}  # section 4.1
reward:
  overlong: {buffer_tokens: 1024}  # section 3.4
trainer: {experiment_name: dapo_training}
"""
