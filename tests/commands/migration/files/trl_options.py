"""
accelerate launch --num_processes 2 trl_options.py \
    --model_name_or_path Qwen/Qwen2.5-0.5B \
    --dataset_name my/pairs \
    --per_device_train_batch_size 4 \
    --learning_rate 1.0e-5 \
    --eval_strategy steps \
    --eval_steps 20 \
    --max_length 512 \
    --use_peft

python trl_options.py --learning_rate 3
"""

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser

parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, num_labels=1)
dataset = load_dataset(script_args.dataset_name)
RewardTrainer(
    model=model,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
).train()
