"""Files of other systems become configs that train the same: sizes are worked out by hand, and what cannot be carried
over is named."""

from pathlib import Path

import pytest
import yaml

from distflow.commands.migration.conversion import as_file, compose, convert
from distflow.commands.migration.read_files import read_foreign
from distflow.config import flatten, load_config, preset_config

FILES = Path(__file__).parent / "files"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OF_TRL = {
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.optim.warmup_ratio": 0.0,
    f"{MODEL}.enable_gradient_checkpointing": True,
    "data.seed": 42,
    "trainer.seed": 42,
    "trainer.test_freq": -1,
    "trainer.keep_last": 1000,
}

# file: (devices that are asked for, preset, what the config sets)
CONFIGS: dict[str, tuple[int | None, str, dict[str, object]]] = {
    # 4 × 8 × 2 devices are 64 completions, of which 8 are of one prompt; each batch is trained on twice, so that 200
    # optimizer steps are 100 of ours.
    "trl_grpo.py": (
        2,
        "grpo",
        OF_TRL
        | {
            "algorithm.adv_epsilon": 1e-4,
            "data.enable_thinking": True,
            "algorithm.scale_rewards": "group",
            "algorithm.mask_truncated": True,
            "data.train_files": ("my/sums:small:train",),
            "data.answer_key": "solution",
            "data.train_batch_size": 8,
            "data.max_response_length": 64,
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.ppo_epochs": 2,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": 0.04,
            f"{ACTOR}.optim.lr": 5e-6,
            f"{ACTOR}.optim.betas": (0.9, 0.99),
            f"{ACTOR}.optim.scheduler": "cosine_with_warmup",
            f"{ROLLOUT}.n": 8,
            f"{ROLLOUT}.temperature": 0.9,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B-Instruct",
            f"{MODEL}.dtype": "bfloat16",
            f"{MODEL}.lora_rank": 8,
            f"{MODEL}.lora_alpha": 32,
            f"{MODEL}.target_modules": ("q_proj",),
            "reward.functions": {"default": ["math", "my_rewards.py:short"]},
            "trainer.default_local_dir": "outputs/sums",
            "trainer.experiment_name": "sums",
            "trainer.total_training_steps": 100,
            "trainer.total_epochs": 3,
            "trainer.save_freq": 25,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 2,
        },
    ),
    # The first command of its text: 4 × 2 devices.
    "trl_options.py": (
        None,
        "rm",
        OF_TRL
        | {
            "data.train_files": ("my/pairs",),
            "data.val_files": ("my/pairs::test",),
            "data.train_batch_size": 8,
            "data.max_prompt_length": 256,
            "data.max_response_length": 256,
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.optim.lr": 1e-5,
            f"{ACTOR}.optim.scheduler": "linear_with_warmup",
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            "trainer.total_epochs": 3,
            "trainer.save_freq": 500,
            "trainer.test_freq": 20,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 2,
        },
    ),
    # 8 × 8 × 2 devices; the defaults of the script's own arguments, and those that the command gives.
    "trl_arguments.sh": (
        None,
        "sft",
        OF_TRL
        | {
            "data.train_files": ("rows.jsonl",),
            "data.train_batch_size": 128,
            "data.max_prompt_length": 1024,
            "data.max_response_length": 1024,
            f"{ACTOR}.ppo_mini_batch_size": 128,
            f"{ACTOR}.optim.lr": 2e-5,
            f"{ACTOR}.optim.scheduler": "linear_with_warmup",
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            "trainer.default_local_dir": "out",
            "trainer.total_epochs": 2,
            "trainer.save_freq": -1,
            "trainer.save_freq_epochs": 1,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 2,
        },
    ),
    # 16 × 2 completions, 4 of each prompt, are generated at once and trained on in one step. RLOO of TRL has its KL
    # in the reward, and sums the tokens of a response.
    "trl_rloo.py": (
        1,
        "grpo",
        OF_TRL
        | {
            "algorithm.adv_estimator": "rloo",
            "algorithm.adv_epsilon": 1e-4,
            "data.enable_thinking": True,
            "algorithm.scale_rewards": "group",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.05,
            "algorithm.kl_penalty": "kl",
            "data.train_files": ("trl-lib/ultrafeedback-prompt::train",),
            "data.train_batch_size": 8,
            "data.max_response_length": 64,
            f"{MODEL}.path": "Qwen/Qwen2-0.5B-Instruct",
            f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum",
            f"{ACTOR}.clip_ratio": 0.1,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": False,
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.optim.lr": 1e-6,
            f"{ACTOR}.optim.scheduler": "linear_with_warmup",
            f"{ROLLOUT}.n": 4,
            "algorithm.reward_clip": 5.0,
            "reward.functions": {"default": [{"name": "my_rewards.py:reward", "weight": 0.5}]},
            "trainer.default_local_dir": "rloo",
            "trainer.total_epochs": 1,
            "trainer.save_freq": 500,
        },
    ),
    "verl_grpo.sh": (
        None,
        "verl_grpo",
        {
            f"{ACTOR}.strategy": "fsdp",
            "algorithm.adv_estimator": "grpo",
            "data.train_files": ("/data/sums/train.parquet",),
            "data.val_files": ("/data/sums/test.parquet",),
            "data.train_batch_size": 64,
            "data.max_response_length": 512,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            f"{ACTOR}.ppo_mini_batch_size": 16,
            f"{ACTOR}.entropy_coef": 0.0,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.val_kwargs.greedy": False,
            f"{ROLLOUT}.val_kwargs.n": 4,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 4,
            "trainer.resume_mode": "never",
        },
    ),
    # 128 samples an optimizer step are 16 prompts of 8.
    "openrlhf_ppo.sh": (
        1,
        "grpo",
        {
            f"{ROLLOUT}.name": "vllm",
            "algorithm.adv_estimator": "grpo",
            "algorithm.reward_clip": 10.0,
            "algorithm.allow_group_of_one": True,
            "algorithm.lam": 1.0,
            "algorithm.use_kl_in_reward": False,
            "data.train_files": ("my/sums",),
            "data.prompt_key": "question",
            "data.answer_key": "answer",
            "data.prompt_format": "chat",
            "data.prompt_template": "Solve: {prompt}",
            "data.enable_thinking": True,
            "data.train_batch_size": 64,
            "data.max_prompt_length": 1024,
            "data.max_response_length": 1024,
            "data.seed": 42,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            f"{MODEL}.dtype": "bfloat16",
            f"{ACTOR}.ppo_mini_batch_size": 16,
            f"{ACTOR}.clip_ratio_low": 0.2,
            f"{ACTOR}.clip_ratio_high": 0.27,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": 1e-3,
            f"{ACTOR}.kl_loss_type": "mse",
            f"{ACTOR}.optim.weight_decay": 0.0,
            f"{ACTOR}.optim.betas": (0.9, 0.95),
            f"{ACTOR}.optim.warmup_ratio": 0.03,
            f"{ACTOR}.optim.min_lr_ratio": 0.1,
            f"{ROLLOUT}.n": 8,
            "reward.functions": {"default": ["custom"]},
            "custom_reward_function.path": "rewards.py",
            "custom_reward_function.name": "reward_func",
            "trainer.total_epochs": 1,
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.keep_last": 3,
            "trainer.logger": ("console", "wandb"),
            "trainer.seed": 42,
        },
    ),
    # 8 devices hold 4 copies: 1 × 16 × 4 samples an optimizer step are 8 prompts of 8.
    "roll_rlvr.yaml": (
        None,
        "rlvr",
        {
            f"{ACTOR}.strategy": "fsdp",
            "trainer.keep_last": 1000,
            **{"trainer.total_training_steps": 500, "trainer.save_freq": 50, "trainer.test_freq": 10},
            "algorithm.adv_estimator": "reinforce",
            "algorithm.reward_norm.mean_level": "group",
            "algorithm.reward_norm.std_level": None,
            "algorithm.reward_clip": None,
            "algorithm.adv_norm.mean_level": "batch",
            "algorithm.adv_norm.std_level": "batch",
            "algorithm.difficulty_mask": (0.1, 1.0),
            "algorithm.allow_group_of_one": True,
            "data.train_files": ("math.jsonl", "code.jsonl"),
            "data.domains": {
                "math_rule": {"tags": ["gsm8k", "aime"], "weight": 0.7, "reward": ["math"]},
                "code_sandbox": {"tags": ["code_sandbox"], "weight": 0.3, "reward": ["code"]},
            },
            "data.tag_key": "tag",
            "data.answer_key": "ground_truth",
            "data.prompt_format": "chat",
            "data.train_batch_size": 32,
            "data.max_prompt_length": 64,
            "data.max_response_length": 128,
            "data.seed": 7,
            f"{MODEL}.path": "Qwen/Qwen3-0.6B",
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
            f"{ACTOR}.clip_ratio": 0.1,
            f"{ACTOR}.clip_ratio_c": 1.2,
            f"{ACTOR}.use_kl_loss": False,
            f"{ACTOR}.optim.lr": 1e-6,
            f"{ACTOR}.optim.weight_decay": 0.0,
            f"{ACTOR}.optim.scheduler": "linear_with_warmup",
            f"{ACTOR}.optim.lr_warmup_steps": 5,
            f"{ROLLOUT}.n": 8,
            f"{ROLLOUT}.temperature": 0.9,
            "trainer.experiment_name": "sums-7",
            "trainer.seed": 7,
            "trainer.launcher": "ray",
            "trainer.n_gpus_per_node": 8,
        },
    ),
    "areal_grpo.sh": (
        None,
        "grpo",
        {
            "algorithm.adv_estimator": "reinforce",
            "algorithm.use_kl_in_reward": False,
            "algorithm.recompute_old_log_probs": "false",
            "algorithm.allow_group_of_one": True,
            "algorithm.lam": 1.0,
            "algorithm.reward_norm.mean_level": "group",
            "algorithm.reward_norm.std_level": "group",
            "algorithm.reward_norm.group_size": 4,
            "data.train_files": ("my/sums",),
            "data.prompt_format": "chat",
            "data.train_batch_size": 32,
            "data.max_prompt_length": 128,
            "data.max_response_length": 256,
            "data.seed": 3,
            f"{MODEL}.path": "Qwen/Qwen2.5-0.5B",
            f"{MODEL}.dtype": "bfloat16",
            f"{ACTOR}.policy_loss": "decoupled",
            f"{ACTOR}.policy_loss_kwargs": {"behav_imp_weight_cap": 5.0},
            f"{ACTOR}.ppo_mini_batch_size": 8,
            f"{ACTOR}.clip_ratio": 0.3,
            f"{ACTOR}.clip_ratio_c": None,
            f"{ACTOR}.use_kl_loss": False,
            f"{ACTOR}.optim.lr": 2e-6,
            f"{ACTOR}.optim.betas": (0.9, 0.95),
            f"{ACTOR}.optim.weight_decay": 0.017,
            f"{ACTOR}.optim.scheduler": "constant_with_warmup",
            f"{ACTOR}.optim.warmup_ratio": 0.001,
            f"{ROLLOUT}.n": 8,
            "async.max_staleness": 2,
            "trainer.project_name": "sums",
            "trainer.experiment_name": "first",
            "trainer.default_local_dir": "/tmp/sums/sums/first",
            "trainer.resume_mode": "never",
            "trainer.total_epochs": 2,
            "trainer.save_freq": -1,
            "trainer.save_freq_epochs": 1,
            "trainer.test_freq": -1,
            "trainer.seed": 3,
        },
    ),
}
MAPS = {"reward.functions", "data.domains"}
MISSING = {
    "trl_grpo.py": (
        "line 48: warmup_steps: it is computed: os.environ['WARMUP']",
        "put short into my_rewards.py",
        "train_dataset: the script changes its rows (map in line ",
        "line 50: top_entropy_quantile=0.2: all tokens contribute",
    ),
    "trl_options.py": (
        "the options are those of the first command",
        "lora_rank=16",
        "lora_dropout=0.05",
        "no adapters",
    ),
    "trl_arguments.sh": ("max_length: prompts and responses have separate limits, here half of it",),
    "trl_rloo.py": ("the ratio is clipped for each token here", "put reward into my_rewards.py"),
    "verl_grpo.sh": (
        "gpus=16; 4 is used",
        "trainer.experiment_name: it is the output of a command",
        "rewards: verl chooses a function by each row's data_source",
        "made_up=3",
    ),
    "openrlhf_ppo.sh": (),
    "roll_rlvr.yaml": (),
    "areal_grpo.sh": ("allocation_mode=sglang:d1+d1", "rewards and columns: AReaL's script has them"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_becomes_a_config_and_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    devices, preset, wanted = CONFIGS[name]
    draft = convert(read_foreign(FILES / name), devices)
    path = tmp_path / "migrated.yaml"
    path.write_text(yaml.safe_dump(as_file(draft, compose(draft))))
    for part in MISSING[name]:
        assert any(part in line for line in draft.missing), (part, draft.missing)
    assert len(draft.missing) <= len(MISSING[name]) + 1, draft.missing
    plain = yaml.safe_load(path.read_text())
    assert plain["defaults"] == [preset, "_self_"]
    base = flatten(preset_config(preset))
    found = flatten(load_config(str(path), complete=False).config)
    for key in MAPS & wanted.keys():
        group, entry = key.split(".")
        assert plain[group][entry] == wanted[key]
    by_hand = {key: value for key, value in wanted.items() if key not in MAPS}
    assert {key: found[key] for key in by_hand} == by_hand
    assert {key for key, value in found.items() if value != base[key]} <= wanted.keys() | MAPS, "nothing else differs"


LR, MODEL_PATH = f"{ACTOR}.optim.lr", f"{MODEL}.path"
TRAINER = "from trl import SFTConfig, SFTTrainer\nfrom datasets import load_dataset\n"
OPTIONS = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=5e-6)\n"
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet"

# What a script computes from its own functions, classes and options, and what a shell script says around its command.
READ = {
    "the arguments of a caller": (
        "py",
        TRAINER + "def train(lr=1e-4, epochs=3, model='m/default'):\n"
        "    a = SFTConfig(learning_rate=lr, num_train_epochs=epochs)\n"
        "    SFTTrainer(model=model, args=a, train_dataset='d/d').train()\n"
        f"{OPTIONS}args = p.parse_args()\ntrain(args.lr, epochs=1, model='m/real')\n",
        {LR: 5e-6, "trainer.total_epochs": 1, MODEL_PATH: "m/real"},
    ),
    "a parser below its reader": (
        "py",
        TRAINER + "def train(args):\n    SFTTrainer(model=args.model, args=SFTConfig(learning_rate=args.lr)).train()\n"
        "def main():\n    p = argparse.ArgumentParser()\n    p.add_argument('--lr', default=3e-5)\n"
        "    p.add_argument('--model', default='m/x')\n    train(p.parse_args())\n"
        "if __name__ == '__main__':\n    main()\n",
        {LR: 3e-5, MODEL_PATH: "m/x"},
    ),
    "two classes with one field": (
        "py",
        TRAINER + "class Teacher:\n    lr: float = 9e-9\n    model: str = 'm/teacher'\n"
        "class Args:\n    lr: float = 1e-5\n    model: str = 'm/student'\nargs = Args()\n"
        "SFTTrainer(model=args.model, args=SFTConfig(learning_rate=args.lr)).train()\n",
        {LR: 1e-5, MODEL_PATH: "m/student"},
    ),
    "a method with the settings of its object": (
        "py",
        TRAINER + "class Job:\n    def __init__(self, model, lr=1e-3):\n        self.model, self.lr = model, lr\n"
        "    def run(self):\n        SFTTrainer(model=self.model, args=SFTConfig(learning_rate=self.lr)).train()\n"
        "Job('m/x', lr=2**-3).run()\n",
        {LR: 0.125, MODEL_PATH: "m/x"},
    ),
    "the old name of a length": (
        "py",
        TRAINER + "SFTTrainer(model='m', args=SFTConfig(max_seq_length=4096)).train()\n",
        {"data.max_prompt_length": 2048, "data.max_response_length": 2048},
    ),
    "mini-batches of PPO": (
        "py",
        "from trl import PPOConfig, PPOTrainer\nc = PPOConfig(per_device_train_batch_size=8, num_mini_batches=2,\n"
        "    gradient_accumulation_steps=4, total_episodes=10000, warmup_ratio=0.2)\n"
        "PPOTrainer(model='m', args=c).train()\n",
        {
            **{"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 32, "trainer.total_training_steps": 157},
            **{"critic.optim.warmup_ratio": 0.2, f"{ACTOR}.optim.warmup_ratio": 0.2},
        },
    ),
    "quotation marks in comments": (
        "sh",
        f'lr=3e-6 # don\'t change\nbs=32  # "small\nx="a # b"\n{VERL} {LR}=$lr data.train_batch_size=$bs '
        'trainer.experiment_name="$x"\n',
        {LR: 3e-6, "data.train_batch_size": 32, "trainer.experiment_name": "a # b"},
    ),
    "a package of that name": (
        "sh",
        f"pip install trl\ncd ~/src/trl\n{VERL} {MODEL_PATH}=$PWD/m\npython3 -m verl.trainer.main_generation a=1\n",
        {MODEL_PATH: "./m"},
    ),
    "a penalty that is off": (
        "sh",
        f"{VERL} reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=4096 "
        f"data.max_response_length=8192 trainer.n_gpus_per_node=8\n",
        {"reward.overlong.buffer_tokens": 0, f"{ACTOR}.strategy": "fsdp"},
    ),
    "the mean of GSPO": (
        "sh",
        f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo\n",
        {f"{ACTOR}.policy_loss": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    ),
    "the mean of GSPO as it is set": (
        "sh",
        f"{VERL} {ACTOR}.loss_agg_mode=token-mean {ACTOR}.policy_loss.loss_mode=gspo\n",
        {f"{ACTOR}.policy_loss": "gspo", f"{ACTOR}.loss_agg_mode": "token-mean"},
    ),
    "a number in the environment": (
        "py",
        TRAINER + "import os\n"
        "bs, n = int(os.getenv('BS', '4')), int(os.environ.get('ACC', '8'))\n"
        "a = SFTConfig(per_device_train_batch_size=bs, gradient_accumulation_steps=n)\n"
        "SFTTrainer(model='m', args=a).train()\n",
        {"data.train_batch_size": 32, "trainer.save_freq": 500},
    ),
    "a mapping that a parser reads": (
        "py",
        "import json\nfrom trl import SFTTrainer\nfrom transformers import HfArgumentParser, TrainingArguments\n"
        "class Lora:\n    lora_r: int\nparser = HfArgumentParser((Lora, TrainingArguments))\n"
        'lora, args = parser.parse_dict(json.loads(\'{"lora_r": 4, "learning_rate": 1e-4, "num_train_epochs": 1}\'))\n'
        "from peft import LoraConfig\n"
        "SFTTrainer(model='m', args=args, peft_config=LoraConfig(r=lora.lora_r)).train()\n",
        {LR: 1e-4, "trainer.total_epochs": 1, f"{MODEL}.lora_rank": 4},
    ),
    "a loader of the script's own": (
        "py",
        TRAINER.replace("from datasets import load_dataset\n", "") + "def load_dataset(path, tokenizer, n):\n"
        "    return [1]\nrows = load_dataset('d.parquet', 'gpt2', 3)\n"
        "SFTTrainer(model='m', args=SFTConfig(), train_dataset=rows).train()\n",
        {"data.train_files": ()},
    ),
    "a loop over one value": (
        "sh",
        f'rates=(1e-3)\nfor rate in "${{rates[@]}}"; do\n{VERL} {LR}=$rate {ACTOR}.strategy=fsdp2 '
        "trainer.n_gpus_per_node=2\ndone\n",
        {LR: 1e-3, f"{ACTOR}.strategy": "fsdp"},
    ),
    "a quotation with escapes": (
        "sh",
        "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain m --dataset d/d "
        "--input_template $'It\\'s {}\\nAnswer: '  # don't\n",
        {"data.prompt_template": "It's {prompt}\nAnswer: ", "trainer.n_gpus_per_node": 4},
    ),
    "a strategy that the critic names again": (
        "sh",
        f"{VERL} algorithm.adv_estimator=gae {ACTOR}.strategy=fsdp2 critic.strategy=fsdp2 trainer.n_gpus_per_node=2\n",
        {f"{ACTOR}.strategy": "fsdp"},
    ),
    "a switch that is negated": (
        "sh",
        "trl grpo --model_name_or_path m --dataset_name d/d --no_scale_rewards\n",
        {"algorithm.scale_rewards": "none"},
    ),
    "lines without a command": (
        "txt",
        f"algorithm.adv_estimator=grpo\ndata.train_batch_size=8\n{MODEL}.path=m\n{ROLLOUT}.n=4\n",
        {"data.train_batch_size": 8, f"{MODEL}.path": "m", f"{ROLLOUT}.n": 4},
    ),
    "a recipe of verl": (
        "sh",
        f"python3 -m recipe.fully_async_policy.fully_async_main data.train_files=a.parquet {LR}=1e-5 {MODEL}.path=m\n",
        {LR: 1e-5, f"{MODEL}.path": "m"},
    ),
    "Megatron": (
        "sh",
        f"{VERL} {ACTOR}.strategy=megatron critic.strategy=megatron trainer.n_gpus_per_node=2\n",
        {f"{ACTOR}.strategy": "fsdp"},
    ),
    "one tracker as a list": (
        "yaml",
        "model_name_or_path: m\ndataset_name: d/d\nnum_generations: 4\nlearning_rate: 1e-6\nreport_to: [wandb]\n",
        {"trainer.logger": ("console", "wandb")},
    ),
    "a reward model of AReaL": (
        "yaml",
        "experiment_name: a\ntrial_name: b\nactor: {path: m/m, is_critic: true, optimizer: {lr: 1e-5}}\n"
        "train_dataset: {path: a/b, type: rw, batch_size: 4}\nvalid_dataset: {path: a/b, batch_size: 4}\n",
        {"data.train_files": ("a/b::train",), "data.val_files": ("a/b::test",), LR: 1e-5},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_what_stands_around_a_setting_is_read(name: str, tmp_path: Path) -> None:
    suffix, text, wanted = READ[name]
    (tmp_path / f"x.{suffix}").write_text(text)
    draft = convert(read_foreign(tmp_path / f"x.{suffix}"), None)
    (tmp_path / "migrated.yaml").write_text(yaml.safe_dump(as_file(draft, compose(draft))))
    found = flatten(load_config(str(tmp_path / "migrated.yaml"), complete=False).config)
    assert {key: found[key] for key in wanted} == wanted
    assert draft.preset == ("rm" if "AReaL" in name else draft.preset)


def test_a_value_that_the_file_does_not_say_is_named_once(tmp_path: Path) -> None:
    """Not once more by each of the sizes that are computed from it."""
    (tmp_path / "x.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\nimport os\nn = int(os.environ['N'])\n"
        "GRPOTrainer(model='m', args=GRPOConfig(num_generations=n), train_dataset='d/d').train()\n"
    )
    missing = convert(read_foreign(tmp_path / "x.py"), 1).missing
    assert [line for line in missing if "num_generations" in line] == [
        f"line 4: num_generations: it is computed: os.environ['N']; write {ROLLOUT}.n=..."
    ]
    assert not any("Unread" in line or line.startswith("_") for line in missing)


@pytest.mark.parametrize(("devices", "prompts"), [(None, 8), (4, 8), (8, 8)])
def test_a_batch_that_a_script_divides_by_its_processes_is_the_same_on_any_number(
    devices: int | None, prompts: int, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text(
        "import os\nfrom trl import GRPOConfig, GRPOTrainer\nworld = int(os.environ.get('WORLD_SIZE', 1))\n"
        "n = 64 // int(os.environ['WORLD_SIZE']) if world > 1 else 64\n"
        "GRPOTrainer(model='m', args=GRPOConfig(per_device_train_batch_size=n), train_dataset='d/d').train()\n"
    )
    draft = convert(read_foreign(tmp_path / "x.py", devices), devices)
    assert draft.overrides["data.train_batch_size"] == str(prompts)


def test_the_address_of_a_server_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d/d "
        "--remote_rm_url http://localhost:5000/get\n"
    )
    draft = convert(read_foreign(tmp_path / "x.sh"), None)
    assert "custom_reward_function.path" not in draft.overrides
    assert any("remote_rm_url=http://localhost:5000/get: it must be a Python file" in line for line in draft.missing)


def test_a_default_is_not_taken_for_what_a_file_says(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        TRAINER + "import yaml\nc = yaml.safe_load(open('c.yaml'))\n"
        "a = SFTConfig(learning_rate=c.get('lr', 1e-5), per_device_train_batch_size=c['bs'])\n"
        "SFTTrainer(model='m', args=a).train()\n"
    )
    draft = convert(read_foreign(tmp_path / "x.py"), 1)
    assert LR not in draft.overrides and "data.train_batch_size" not in draft.overrides
    assert [line.partition(":")[0] for line in draft.missing if "c[" in line or "c.get" in line] == ["line 5", "line 5"]


def test_options_of_a_command_that_is_not_there_are_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser\n"
        "args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "GRPOTrainer(model=model_args.model_name_or_path, args=args).train()\n"
    )
    assert any(
        "takes its settings from a command line" in line for line in convert(read_foreign(tmp_path / "x.py"), 1).missing
    )
