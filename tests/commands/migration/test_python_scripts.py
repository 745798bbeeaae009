"""A setting of a script that uses TRL keeps its meaning, or is named."""

from pathlib import Path

import pytest

from distflow.commands.migration.conversion import compose, convert
from distflow.commands.migration.read_files import read_foreign
from distflow.config import flatten
from distflow.config.keys.reward import RewardPart

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION, LR = "algorithm.rollout_correction", f"{ACTOR}.optim.lr"
START = "from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer\nfrom peft import LoraConfig\n"
PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--big', action='store_true')\n"
FLAG = START + PARSER + "args = p.parse_args()\nkw = {'beta': 0.1}\n"
GRPO = "GRPOTrainer(model='m', train_dataset='d/d', args="


def grpo(settings: str, trainer: str = "") -> str:
    return f"{START}{GRPO}GRPOConfig({settings}), {trainer}).train()\n"


def sft(settings: str) -> str:
    return f"{START}SFTTrainer(model='m', train_dataset='d/d', args=SFTConfig({settings})).train()\n"


# name: (kind of file, text, what the config has, what is said)
READ: dict[str, tuple[str, str, dict[str, object], tuple[str, ...]]] = {
    "files of each split": (
        "py",
        START + "rows = load_dataset('json', data_files={'train': ['a.jsonl', 'b.jsonl'], 'test': 'c.jsonl'})\n"
        "SFTTrainer(model='m', args=SFTConfig(), train_dataset=rows['train'], eval_dataset=rows['test']).train()\n",
        {"data.train_files": ("a.jsonl", "b.jsonl"), "data.val_files": ("c.jsonl",)},
        (),
    ),
    "the length of a response": ("py", grpo(""), {"data.max_response_length": 512}, ()),
    "options that the command of the script leaves out": (
        "py",
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, "
        "TrlParser\n# python x.py --learning_rate 2e-6 --num_generations 4\n"
        "script, args, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "splits = load_dataset(script.dataset_name if script.dataset_name else 'a/b')\n"
        "val = splits['test'] if 'test' in splits else None\n"
        "GRPOTrainer(model=model.model_name_or_path or 'm', args=args, train_dataset=splits['train']).train()\n",
        {f"{MODEL}.path": "m", "data.train_files": ("a/b::train",), LR: 2e-6, f"{ROLLOUT}.n": 4},
        ("the options are those of the first command",),
    ),
    "several configs": (
        "py",
        START + "a = GRPOConfig(beta=0.1, warmup_steps=3, max_steps=100)\nb = GRPOConfig(learning_rate=2e-6)\n"
        f"b.max_steps = 7\n{GRPO}b).train()\n",
        {
            LR: 2e-6,
            f"{ACTOR}.use_kl_loss": False,
            f"{ACTOR}.optim.lr_warmup_steps": -1,
            "trainer.total_training_steps": 7,
        },
        ("the GRPOConfig in line 4 is read, not in line 3",),
    ),
    "the config that the trainer gets": (
        "py",
        START + f"a, b = GRPOConfig(beta=0.1, output_dir='x'), GRPOConfig(output_dir='y')\n{GRPO}a).train()\n",
        {f"{ACTOR}.kl_loss_coef": 0.1, "trainer.default_local_dir": "x"},
        (),
    ),
    "configs in a loop": (
        "py",
        START + "a = GRPOConfig(beta=0.1)\nb = GRPOConfig(learning_rate=2e-6)\n"
        f"for each in (a, b):\n    {GRPO}each).train()\n",
        {LR: 2e-6, f"{ACTOR}.use_kl_loss": False},
        ("the GRPOConfig in line 4 is read, not in line 3",),
    ),
    "entries of a mapping": (
        "py",
        START + "common = dict(beta=0.1, num_generations=4)\nkw = {**common, 'learning_rate': 2e-6, 'max_steps': 9}\n"
        "kw.update({'max_steps': 3}, temperature=0.5)\nkw['top_p'] = 0.9\nkw |= {'seed': 5}\nkw.pop('beta')\n"
        f"kw = dict(kw, top_k=7)\n{GRPO}GRPOConfig(**kw)).train()\n",
        {
            **{LR: 2e-6, "trainer.total_training_steps": 3, "trainer.seed": 5, f"{ACTOR}.use_kl_loss": False},
            **{f"{ROLLOUT}.n": 4, f"{ROLLOUT}.temperature": 0.5, f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": 7},
        },
        (),
    ),
    "what a list gets": (
        "py",
        "from trl.rewards import get_soft_overlong_punishment\n"
        + START
        + "from datasets import concatenate_datasets, load_dataset\n"
        + "rewards = ['r/m']\nrewards.append(get_soft_overlong_punishment(512, 16))\nrewards += [f(1)]\n"
        "rows = concatenate_datasets([load_dataset('a/b', split='train'), load_dataset('c/d', split='train')])\n"
        "GRPOTrainer('m', rewards, GRPOConfig(beta=0.1), rows, load_dataset('e/f', split='test')).train()\n",
        {
            **{"data.train_files": ("a/b::train", "c/d::train"), "data.val_files": ("e/f::test",)},
            **{"reward.overlong.buffer_tokens": 16, f"{ACTOR}.kl_loss_coef": 0.1, f"{MODEL}.path": "m"},
        },
        ("reward_funcs: it is computed: f(1)",),
    ),
    "a function of TRL": (
        "py",
        "from trl.rewards import think_format_reward\n" + START + "rows = load_dataset('a/b', split='train[:5%]')\n"
        "GRPOTrainer('m', [think_format_reward], GRPOConfig(), rows)\n",
        {"reward.functions": {"default": (RewardPart("trl.rewards:think_format_reward"),)}},
        (
            "think_format_reward is a function of TRL, which must be installed",
            "data.val_max_samples take the first rows",
        ),
    ),
    "arguments of a trainer by their places": (
        "py",
        START + "SFTTrainer('m', SFTConfig(learning_rate=2e-6), None, 'd/d').train()\n",
        {f"{MODEL}.path": "m", "data.train_files": ("d/d",), LR: 2e-6},
        (),
    ),
    "entries that cannot be read": (
        "py",
        START
        + f"from others import more\nkw = {{**more, 'beta': 0.1}}\nkw.update(more)\n{GRPO}GRPOConfig(**kw)).train()\n",
        {f"{ACTOR}.kl_loss_coef": 0.1},
        ("line 4: its entries cannot be read: more", "line 5: its other arguments cannot be read"),
    ),
    "sums that go on": (
        "py",
        START + "n, steps = 2, 0\nn *= 2\nfor _ in range(3):\n    steps += 100\n"
        f"{GRPO}GRPOConfig(num_generations=n, max_steps=steps)).train()\n",
        {f"{ROLLOUT}.n": 4, "trainer.total_training_steps": None},
        ("line 7: max_steps: it is changed in a loop",),
    ),
    "adapters of another file": (
        "py",
        START + f"import own\n{GRPO}GRPOConfig(), peft_config=own.PEFT).train()\n",
        {f"{MODEL}.lora_rank": 0},
        ("line 4: peft_config: `own.PEFT` has no value in the file; set its entries",),
    ),
    "quantised weights": (
        "py",
        START + "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n"
        "model = AutoModelForCausalLM.from_pretrained('m', quantization_config=BitsAndBytesConfig(load_in_4bit=True))\n"
        "GRPOTrainer(model=model, train_dataset='d/d', args=GRPOConfig()).train()\n",
        {},
        ("quantised weights are not supported",),
    ),
    "an environment": (
        "py",
        START + f"{GRPO}GRPOConfig(), environment_factory=Env).train()\n",
        {},
        ("the workflow environment (docs/tools.md) plays one",),
    ),
    "a line of a mapping": (
        "py",
        START + f"kw = {{\n    'beta': 0.1,\n    'top_entropy_quantile': 0.2,\n}}\n{GRPO}GRPOConfig(**kw)).train()\n",
        {},
        ("line 5: top_entropy_quantile=0.2: ",),
    ),
    "a choice by an option": (
        "py",
        FLAG + f"if args.big:\n    kw['num_generations'] = 4\nif args.big:\n    print('big')\n"
        f"{GRPO}GRPOConfig(learning_rate=1e-5 if args.big else 2e-6, **kw)).train()\n",
        {LR: 2e-6, f"{ROLLOUT}.n": 8},
        (
            "line 8: `args.big` is False by the defaults of the script's options; the other case is left out",
            "line 12: `args.big` is False by the defaults",
        ),
    ),
    "a choice by a copy of an option": (
        "py",
        FLAG + f"is_big = args.big\nif is_big and is_big is not None:\n    kw['num_generations'] = 4\n"
        f"{GRPO}GRPOConfig(**kw)).train()\n",
        {f"{ROLLOUT}.n": 8},
        ("line 9: `is_big and is_big is not None` is False by the defaults of the script's options",),
    ),
    "an option with another name": (
        "py",
        START
        + PARSER.replace("'--big', action='store_true'", "'--no-kl', dest='kl', action='store_false'")
        + f"args = p.parse_args()\n{GRPO}GRPOConfig(beta=0.1 if args.kl else 0.0)).train()\n",
        {f"{ACTOR}.kl_loss_coef": 0.1},
        ("line 7: `args.kl` is True by the defaults",),
    ),
    "entries that are deleted": (
        "py",
        START + f"import os\nkw = {{'beta': 0.1, 'num_generations': 4, 'seed': 3}}\ndel kw['beta']\n"
        f"if os.environ['X']:\n    del kw['seed'], kw['top_k']\n{GRPO}GRPOConfig(**kw)).train()\n",
        {f"{ACTOR}.use_kl_loss": False, f"{ROLLOUT}.n": 4},
        ("seed: it is removed in a branch",),
    ),
    "rewards that options name": (
        "py",
        START
        + "from rewards import long, right\nfrom dataclasses import field\nfrom transformers import HfArgumentParser\n"
        "class Own:\n    names: list[str] = field(default_factory=lambda: ['right'])\n"
        "own, args = HfArgumentParser((Own, GRPOConfig)).parse_args_into_dataclasses()\n"
        "known = {'long': long, 'right': right}\n"
        f"{GRPO}args, reward_funcs=[known[each] for each in own.names]).train()\n",
        {},
        ("put right into my_rewards.py", "the script takes its settings from a command line"),
    ),
    "texts that are put together": (
        "py",
        START + "import os\nname = 'a/Qwen-B'\nout = os.path.join('out', name.split('/')[-1].lower())\n"
        f"{GRPO}GRPOConfig(output_dir=out, run_name=name.replace('/', '-'))).train()\n",
        {"trainer.default_local_dir": "out/qwen-b", "trainer.experiment_name": "a-Qwen-B"},
        (),
    ),
    "a part of the training rows": (
        "py",
        START + "from datasets import load_dataset\nd = load_dataset('a/b', split='train').train_test_split(0.1)\n"
        "GRPOTrainer(model='m', args=GRPOConfig(), train_dataset=d['train'], eval_dataset=d['test']).train()\n",
        {"data.train_files": ("a/b::train",), "data.val_files": ()},
        (
            "train_dataset: the script changes its rows (train_test_split in line 4)",
            "eval_dataset: it is a part of the",
        ),
    ),
    "the command in comments": (
        "py",
        "# accelerate launch --num_processes 4 \\\n#     x.py --beta 0.2 \\\n#     --seed 7\n"
        + START
        + "from transformers import HfArgumentParser\n"
        f"args, = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()\n{GRPO}args).train()\n",
        {f"{ACTOR}.kl_loss_coef": 0.2, "trainer.seed": 7},
        ("the options are those of the first command",),
    ),
    "a choice that is not known": (
        "py",
        START + "import os\nkw = {'beta': 0.1}\nif os.environ['X']:\n    kw.update(beta=0.2, num_generations=4)\n"
        f"{GRPO}GRPOConfig(**kw), peft_config=LoraConfig() if os.environ['Y'] else None).train()\n",
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_alpha": 8.0},
        (
            "beta: it has a different value in a branch",
            "num_generations: it has a different value in a branch",
            "line 7: it is taken that `os.environ['Y']`",
        ),
    ),
    "adapters of a command": (
        "sh",
        "trl grpo --model_name_or_path m --dataset_name d/d --use_peft",
        {f"{MODEL}.lora_rank": 16, f"{MODEL}.lora_alpha": 32.0},
        ("lora_dropout=0.05: adapters have no dropout",),
    ),
    "adapters of a command with their sizes": (
        "sh",
        "trl grpo --model_name_or_path m --dataset_name d/d --use_peft --lora_alpha 4 --lora_dropout 0.0",
        {f"{MODEL}.lora_rank": 16, f"{MODEL}.lora_alpha": 4.0},
        (),
    ),
    "options of the script's own": (
        "sh",
        "python x.py --size 4 --learning_rate 2e-6",
        {LR: 2e-6, f"{ROLLOUT}.n": 4},
        (),
    ),
    "no adapters": (
        "sh",
        "trl grpo --model_name_or_path m --dataset_name d/d --use_peft false",
        {f"{MODEL}.lora_rank": 0},
        (),
    ),
    "a share of the run": (
        "py",
        sft("eval_strategy='steps', eval_steps=0.1, save_steps=0.25, max_steps=200"),
        {"trainer.test_freq": 20, "trainer.save_freq": 50, "trainer.total_training_steps": 200},
        (),
    ),
    "a share of a run whose length is not known": (
        "py",
        sft("eval_strategy='steps', eval_steps=0.1, save_strategy='epoch'"),
        {"trainer.save_freq_epochs": 1},
        ("trainer.test_freq: 0.1 is a share of the run, whose number of steps is not in the file",),
    ),
    "a warm-up by a share": (
        "py",
        grpo("warmup_steps=0.1"),
        {f"{ACTOR}.optim.lr_warmup_steps": -1, f"{ACTOR}.optim.warmup_ratio": 0.1},
        (),
    ),
    "vLLM": (
        "py",
        grpo("use_vllm=True"),
        {
            f"{ROLLOUT}.name": "vllm",
            f"{CORRECTION}.rollout_is": "sequence",
            f"{CORRECTION}.rollout_is_threshold": (0.0, 3.0),
        },
        (),
    ),
    "vLLM with another correction": (
        "py",
        grpo("use_vllm=True, vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_cap=2.0"),
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 2.0},
        (),
    ),
    "vLLM without a correction": (
        "py",
        grpo("use_vllm=True, vllm_importance_sampling_correction=False"),
        {f"{ROLLOUT}.name": "vllm", f"{CORRECTION}.rollout_is": None},
        (),
    ),
    "no vLLM": ("py", grpo("use_vllm=False"), {f"{ROLLOUT}.name": "embedded", f"{CORRECTION}.rollout_is": None}, ()),
    "long prompts": (
        "py",
        grpo("max_prompt_length=64"),
        {"data.max_prompt_length": 64, "data.filter_overlong_prompts": False, "data.truncation": "left"},
        (),
    ),
    "options of a scheduler": (
        "py",
        grpo("lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.2, 'power': 2}"),
        {f"{ACTOR}.optim.min_lr_ratio": 0.2},
        ("lr_scheduler_kwargs.power=2: the scheduler has no such option",),
    ),
    "a least rate": (
        "py",
        grpo("learning_rate=2e-6, lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs=dict(min_lr=1e-6)"),
        {f"{ACTOR}.optim.min_lr_ratio": 0.5, LR: 2e-6},
        (),
    ),
    "a least rate of a rate that is not read": (
        "py",
        grpo("learning_rate=f(), lr_scheduler_kwargs=dict(min_lr=1e-6)"),
        {f"{ACTOR}.optim.min_lr_ratio": 0.0},
        (f"{ACTOR}.optim.min_lr_ratio: it is computed: f()", "learning_rate: it is computed: f()"),
    ),
    "thinking": ("py", grpo(""), {"data.enable_thinking": True}, ()),
    "thinking is switched off": (
        "py",
        grpo("chat_template_kwargs={'enable_thinking': False, 'style': 'short'}"),
        {"data.enable_thinking": False, "data.apply_chat_template_kwargs": {"style": "short"}},
        (),
    ),
    "strings that end a response": (
        "py",
        grpo("generation_kwargs={'stop_strings': ['</a>']}"),
        {f"{ROLLOUT}.stop": ("</a>",)},
        (),
    ),
    "the dtype of the weights": (
        "py",
        grpo("model_init_kwargs={'torch_dtype': 'float32'}"),
        {f"{MODEL}.dtype": "bfloat16"},
        (),
    ),
    "the dtype of the computation": (
        "py",
        grpo("model_init_kwargs={'dtype': 'float32'}, bf16=False"),
        {f"{MODEL}.dtype": "float32"},
        (),
    ),
    "a part that is no text": (
        "py",
        START + "class Own:\n    def __init__(self, n):\n        self.n = n\n"
        f"{GRPO}GRPOConfig(generation_kwargs={{'stop': [Own(1)], 'seed': f()}}), callbacks=[Own(2)]).train()\n",
        {},
        (
            "line 6: generation_kwargs: it is an object of the script",
            "line 6: callbacks: it is an object of the script",
        ),
    ),
    "reward functions of which one is not read": (
        "py",
        "from trl.rewards import accuracy_reward, get_soft_overlong_punishment\n"
        + grpo(
            "max_completion_length=64, reward_weights=[1.0, 0.5, 0.2, 3.0]",
            "reward_funcs=[accuracy_reward, f(1), get_soft_overlong_punishment(64, soft_punish_cache=16), 'r/m']",
        ),
        {"reward.overlong.buffer_tokens": 16, "reward.overlong.factor": 0.2},
        ("reward_funcs: it is computed: f(1); add what it does to reward.functions",),
    ),
    "a loss of whole sequences": (
        "py",
        grpo("loss_type='luspo', importance_sampling_level='sequence', trackio_space_id=None"),
        {f"{ACTOR}.policy_loss": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"},
        (),
    ),
    "a scale that does not exist here": ("py", grpo("scale_rewards='mean'"), {}, ("scale_rewards is 'mean'",)),
    "the column of TRL's accuracy": (
        "py",
        "from trl.rewards import accuracy_reward\n" + grpo("", "reward_funcs=accuracy_reward"),
        {"reward.functions": {"default": (RewardPart("math"),)}, "data.answer_key": "solution"},
        (),
    ),
    "a folder by its place": ("py", grpo("'out', beta=0.1"), {"trainer.default_local_dir": "out"}, ()),
    "a parameter of TRL's trainer": (
        "py",
        "def long(completions, completion_ids, log_metric=None):\n    return [0.0]\n" + grpo("", "reward_funcs=[long]"),
        {},
        ("put long into my_rewards.py", "long takes completion_ids, which does not exist here"),
    ),
    "the best checkpoint": (
        "py",
        START + "SFTTrainer(model='m', train_dataset='d/d', eval_dataset='e/e', args=SFTConfig(save_strategy='best', "
        "eval_strategy='epoch', metric_for_best_model='eval_loss', greater_is_better=False)).train()\n",
        {
            **{"trainer.keep_best": True, "trainer.keep_best_metric": "sft/val_loss"},
            **{"trainer.save_freq": -1, "trainer.save_freq_epochs": 1, "trainer.test_freq_epochs": 1},
        },
        (),
    ),
    "another loss of fine-tuning": (
        "py",
        sft("loss_type='dft', chat_template_path='chat.jinja'"),
        {f"{MODEL}.tokenizer_path": None},
        (
            "loss_type=dft: the loss is the mean negative log-likelihood",
            "chat_template_path=chat.jinja: the tokenizer's",
        ),
    ),
    "a penalty that ends elsewhere": (
        "py",
        "from trl.rewards import get_soft_overlong_punishment\n"
        + grpo("max_completion_length=64", "reward_funcs=[get_soft_overlong_punishment(32, 16), 'r/m']"),
        {"reward.overlong.buffer_tokens": 16},
        ("get_soft_overlong_punishment: it ends at 32 tokens",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_setting_keeps_its_meaning_or_is_named(name: str, tmp_path: Path) -> None:
    suffix, text, wanted, said = READ[name]
    (tmp_path / "x.py").write_text(
        START + "from transformers import HfArgumentParser\nclass Own:\n    size: int = 8\n"
        "own, args = HfArgumentParser((Own, GRPOConfig)).parse_args_into_dataclasses()\n"
        f"args.num_generations = own.size\n{GRPO}args).train()\n"
    )
    (tmp_path / f"x.{suffix}").write_text(text)
    draft = convert(read_foreign(tmp_path / f"x.{suffix}"), 1)
    found = flatten(compose(draft).config)
    assert {key: found[key] for key in wanted} == wanted
    for part in said:
        assert any(part in line for line in draft.missing), (part, draft.missing)
    others = [line for line in draft.missing if not any(part in line for part in said)]
    assert not [line for line in others if not line.startswith(("max_length: ", "assistant_only_loss="))], others
    assert not any("Unread(" in line or "Object(" in line for line in draft.missing)


def test_a_reward_function_that_is_not_read_leaves_the_others(tmp_path: Path) -> None:
    _, text, _, _ = READ["reward functions of which one is not read"]
    (tmp_path / "x.py").write_text(text)
    draft = convert(read_foreign(tmp_path / "x.py"), 1)
    functions = flatten(compose(draft).config)["reward.functions"]
    assert isinstance(functions, dict)
    assert [(part.name, part.weight) for part in functions["default"]] == [("math", 1.0), ("model", 3.0)]
