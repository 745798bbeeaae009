"""The work that the benchmarks share with their peers: a random decoder whose answers have known
lengths, prompts, a verdict, and a `distflow train` over them."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from distflow.observe.run_reader import MetricsRecord, read_metrics

PROMPT_TOKENS = 16
PAD = 0
EOS = 1
_BIAS_CHANNEL_SIZE = 0.3  # of a residual stream whose other channels begin at 0.02
_NEVER = -50.0

VERIFIER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
"""


@dataclass(frozen=True)
class Shape:
    """hidden, layers, head_dim, groups (query heads a key-value head), intermediate
    (None: three times hidden): of the decoder. ends: the mean length of an answer
    in tokens; None never ends one. dtype: of the products, float32 or bfloat16."""

    hidden: int = 128
    layers: int = 4
    ends: float | None = None
    dtype: str = "float32"
    head_dim: int = 32
    groups: int = 2
    intermediate: int | None = None
    vocabulary: int = 1024


@dataclass(frozen=True)
class Work:
    """longest: tokens that an answer may have. prompts: of a step, each with 8 answers."""

    shape: Shape
    longest: int
    prompts: int = 32


WORKS = {
    "fixed-1m": Work(Shape(128, 4), 64),
    "long-1m": Work(Shape(128, 4, ends=64.0), 512),
    "fixed-10m": Work(Shape(384, 6, dtype="bfloat16"), 64),
    "long-10m": Work(Shape(384, 6, ends=64.0, dtype="bfloat16"), 512),
    "vocab-1m": Work(Shape(128, 4, vocabulary=32768), 64),
    "fixed-25m": Work(Shape(512, 8), 32),
    "fixed-135m": Work(
        Shape(
            576, 30, dtype="bfloat16", head_dim=64, groups=3, intermediate=1536, vocabulary=49152
        ),
        64,
        prompts=8,
    ),
    "gpu-135m": Work(
        Shape(
            576,
            30,
            ends=256.0,
            dtype="bfloat16",
            head_dim=64,
            groups=3,
            intermediate=1536,
            vocabulary=49152,
        ),
        1024,
    ),
}
"""fixed-135m and gpu-135m: the shape of SmolLM2-135M, but for a head of its own."""


@dataclass(frozen=True)
class Step:
    """seconds: from the end of the last step to the end of this one. rollout: of these, the wait
    for all groups. update: forward, backward and the optimizer. tokens: answered. memory: of the
    process at its peak in this step, in bytes. norm: of the gradient."""

    seconds: float
    rollout: float
    update: float
    tokens: float
    memory: float
    norm: float


def write_work(folder: Path, shape: Shape, num_rows: int = 4096) -> int:
    """`folder`/model in Hugging Face format, rows.jsonl, verifier.py; returns the number of
    weights."""
    make_tokenizer(shape.vocabulary).save_pretrained(folder / "model")
    model = make_model(shape)
    model.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(
        2, shape.vocabulary, (num_rows, PROMPT_TOKENS), generator=generator
    ).tolist()
    rows = [{"prompt": " ".join(f"w{word}" for word in row), "answer": ""} for row in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "verifier.py").write_text(VERIFIER)

    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def make_model(shape: Shape) -> LlamaForCausalLM:
    """One channel of the residual stream is a constant that no layer writes to: what the head reads
    from it is a bias, by which an answer ends with the same chance after every token, whatever
    stands before. Padding is never drawn: a text would not show it."""
    torch.manual_seed(0)
    num_heads = shape.hidden // shape.head_dim
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate or shape.hidden * 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // shape.groups,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight[:, 0] = _BIAS_CHANNEL_SIZE

    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0

    head = model.lm_head.weight
    head[:, 0] = 0.0
    head[:2] = 0.0
    probe = torch.randint(2, shape.vocabulary, (8, 64), generator=torch.Generator().manual_seed(2))
    hidden = model.model(probe).last_hidden_state
    others = (hidden @ head.T)[..., 2:].logsumexp(-1).mean()
    wanted = _NEVER if shape.ends is None else float(others) - math.log(shape.ends - 1)
    head[PAD, 0], head[EOS, 0] = (bias / float(hidden[..., 0].mean()) for bias in (_NEVER, wanted))

    return model


def train(folder: Path, name: str, work: Work, steps: int, *options: str) -> list[Step]:
    """A `distflow train grpo` of its own, as it ships, of 8 answers a prompt; its steps. options:
    its own besides."""
    command = [
        *(sys.executable, "-m", "distflow", "train", "grpo"),
        f"data.train_files={folder}/rows.jsonl",
        f"data.train_batch_size={work.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={work.longest}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.model.dtype={work.shape.dtype}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.n=8",
        "reward.functions={default: [custom]}",
        f"custom_reward_function.path={folder}/verifier.py",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}/{name}",
        *options,
    ]
    _run(command)
    records = [record for record in read_metrics(folder / name) if record.kind == "train"]

    return [
        _step(record, after, work.prompts)
        for record, after in zip(records[1:], records, strict=False)
    ]


def run_peer(command: list[str], folder: Path, job: dict[str, Any]) -> Any:
    """What a peer's pipeline, which reads `folder`/job.json, leaves in done.json."""
    (folder / "job.json").write_text(json.dumps(job))
    _run(command)
    return json.loads((folder / "done.json").read_text())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _step(record: MetricsRecord, after: MetricsRecord, prompts: int) -> Step:
    values = record.values
    return Step(
        seconds=record.t - after.t,
        rollout=values["timing_s/rollout"],
        update=values["timing_s/train_step"],
        tokens=values["rollout/avg_response_length"] * prompts * 8,
        memory=values["memory/process/peak"],
        norm=values["actor/grad_norm"],
    )


def ids_of(text: object) -> list[int]:
    """Of a recorded prompt or answer."""
    return [int(word[1:]) for word in str(text).split()]


def make_tokenizer(vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocabulary))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
