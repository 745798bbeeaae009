set -x
read -r -d '' training_commands <<END
openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 1 --actor_num_gpus_per_node 2 \
   --pretrain Qwen/Qwen2.5-0.5B \
   --remote_rm_url rewards.py \
   --prompt_data my/sums --input_key question --label_key answer --apply_chat_template \
   --advantage_estimator group_norm --n_samples_per_prompt 8 \
   --rollout_batch_size 64 --train_batch_size 128 \
   --use_kl_loss --init_kl_coef 1e-3 --kl_estimator k2 \
   --eps_clip_low_high 0.2 0.27 \
   --input_template 'Solve: {}' \
   --vllm_num_engines 2 --bf16 --use_wandb {token}
END
ray job submit -- python3 -m $training_commands
