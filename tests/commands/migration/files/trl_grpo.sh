set -x
accelerate launch --num_processes 2 train_sums_grpo.py \
    --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
    --reward_funcs accuracy_reward short \
    --output_dir outputs/sums --run_name sums --dataset_name "$ROWS" \
    --learning_rate 5e-6 --adam_beta2 0.99 --lr_scheduler_type cosine \
    --warmup_steps $((10 * 2)) \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \
    --num_generations 8 --num_iterations 2 --max_completion_length 64 \
    --mask_truncated_completions --temperature 0.9 --beta 0.04 \
    --max_steps 200 --save_strategy steps --save_steps 50 \
    --top_entropy_quantile 0.2 \
    --use_vllm True --vllm_gpu_memory_utilization 0.3 \
    --use_peft --lora_r 8 --lora_alpha 32 --lora_target_modules q_proj k_proj 2>&1 | tee log.txt
