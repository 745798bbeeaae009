accelerate launch --num_processes 2 trl_arguments.py --batch-size 8 --data rows.jsonl
