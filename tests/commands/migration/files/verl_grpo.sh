#!/usr/bin/env bash
set -xeuo pipefail
gpus=${GPUS:-4}
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['/data/sums/train.parquet']" \
    data.val_files=/data/sums/test.parquet \
    data.train_batch_size=64 \
    data.max_response_length=$limit \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    +actor_rollout_ref.actor.made_up=3 \
    trainer.experiment_name="sums_$(date +%m)" \
    trainer.n_gpus_per_node=$gpus trainer.nnodes=1 trainer.resume_mode=disable "$@"
