"""Dr.GRPO: no division by a group's deviation, and none by a response's length."""

PAPER = "Liu et al. 2025, arXiv:2503.20783"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {norm_adv_by_std_in_grpo: false}
actor_rollout_ref:
  actor:
    loss_agg_mode: seq-mean-token-sum-norm  # a constant in place of the response's length
    use_kl_loss: false
trainer: {experiment_name: dr_grpo_training}
"""
