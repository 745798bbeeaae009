"""Speed on a GPU, against transformers and against what the device can do, on random weights of
Qwen2.5's shapes.

    make bench-gpu    # which is: python benchmarks/gpu.py --record
    python benchmarks/gpu.py [--shape 0.5b 1.5b --work decode prefill update longtail step --batch
    64 256 --rounds 3]

`--device cpu --shape tiny` runs all of it but `step` on a CPU, as a test of the code; its figures
say nothing. `--record` writes what is printed into RESULTS.md.

Shares are of what the device was measured to do, and of its data sheet
(`distflow/planning/devices.toml`).

- decode: tokens a second of the embedded engine and of `generate` (dynamic cache, sdpa) behind
  prompts of 128 tokens: the time for `--new-tokens` less the time for 1. Share: of the bandwidth of
  a copy on the device, by `decode_bytes`. Then the engine `hf` over samples of one prompt, and vLLM
  where `.venv-vllm` has one for this device.
- prefill: prompts of 1,024 tokens to their first token, engine and model. Share: of the rate of a
  square product in the same type, by `forward_flops`.
- update: an optimizer step of GRPO over 4 micro-batches of `--tokens` tokens, half of each sequence
  a response: bfloat16 over float32 weights, as a run makes it, optimizer and loss included. Share
  (MFU): by `update_flops`. There is no peer: `train_step.py` has TRL.
- step: seconds of a whole GRPO step of `distflow train` on 135 M parameters (`gpu-135m` of
  `workload.py`), and against TRL with and without vLLM where `make bench-peers` has made it
  (`train_step.py`).
- longtail: 8 answers to each of 32 prompts; after each token an answer ends with a chance of one in
  sixty-four, and at `--longest`. `generate` gets the same lengths in batches of 32, 64 and 256,
  each as long as its longest, and its best counts.

Ours and theirs run turn by turn in one process on the same weights; medians of `--rounds`, after
one that is not counted.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import train_step
from peers.hf_rollout import step as generate_step
from record import RESULTS, recorded
from roofline import (
    Decoder,
    copy_rate,
    decode_bytes,
    forward_flops,
    matmul_rate,
    seconds_of,
    update_flops,
)
from transformers import AutoModelForCausalLM, Qwen2Config
from workload import WORKS as TRAINED
from workload import make_tokenizer, run_peer, write_work

from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch
from distflow.launch.threads import avoid_cudnn_attention
from distflow.models.loading import ready
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from distflow.rollout.hf_engine import HFEngine
from distflow.scheduling.group_states import Version
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine

COMMON = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
WORKS = ("decode", "prefill", "update", "longtail", "step")
ROOT = Path(__file__).resolve().parents[1]
VLLM = ROOT / ".venv-vllm/bin/python"
VLLM_MEMORY = 0.6
"""Share of the device's memory that vLLM may have beside what this process holds."""
DTYPE = torch.bfloat16
HF_BATCHES = (32, 64, 256)
Request = tuple[list[int], int]
"""Prompt ids, tokens wanted."""


@dataclass(frozen=True)
class Rates:
    """Bytes and FLOPs a second."""

    bandwidth: float
    flops: float


def data_sheet(name: str) -> Rates | None:
    """Of the device of that name; None where `devices.toml` does not have it."""
    entries = tomllib.loads(files("distflow.planning").joinpath("devices.toml").read_text("utf-8"))[
        "device"
    ]
    parts = name.replace("-", " ").split()

    for entry in entries:
        if all(word in parts for word in entry["words"]):
            return Rates(entry["gbps"] * 1e9, entry["tflops"] * 1e12)

    return None


@dataclass(frozen=True)
class Needed:
    """What work must move or compute at least, in bytes or FLOPs."""

    amount: float
    kind: Literal["bandwidth", "flops"]

    def share(self, seconds: float, rates: Rates | None) -> str:
        """Of the time at these rates in what it took."""
        return "-" if rates is None else f"{self.amount / getattr(rates, self.kind) / seconds:.1%}"


@dataclass(frozen=True)
class Bench:
    """A model on a device, what the device was measured to do, what its data sheet says, and how
    often to measure."""

    name: str
    model: Any
    device: torch.device
    rates: Rates
    sheet: Rates | None
    rounds: int

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self.model.config)


def config_of(shape: str) -> Qwen2Config:
    return Qwen2Config(**COMMON, **SHAPES[shape], pad_token_id=0, bos_token_id=None, eos_token_id=1)


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype).eval()


def prompts_of(bench: Bench, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, bench.decoder.vocabulary, (count, length), generator=generator).tolist()


def ours(bench: Bench, work: Sequence[Request]) -> float:
    """Seconds in which the engine answers all requests; they are there when it begins. It has
    answered them once before, as an engine of a run has in its first steps: that made its memory,
    and recorded its graphs."""

    async def run() -> float:
        engine = EmbeddedEngine(
            bench.model,
            make_tokenizer(),
            version=Version(0, 0),
            max_num_seqs=len(work),
            shares_weights=True,
            compute_dtype=DTYPE,
        )
        async with engine:
            for _ in range(2):
                seconds = await _answer(engine, work)
            await engine.pause(release=True)  # its memory is the peer's now

        return seconds

    return asyncio.run(run())


async def _answer(engine: EmbeddedEngine, work: Sequence[Request]) -> float:
    await engine.pause()
    tasks = [
        asyncio.create_task(engine.generate(_request(number, prompt, length)))
        for number, (prompt, length) in enumerate(work)
    ]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    start = loop.time()
    await engine.resume()
    results = await asyncio.gather(*tasks)
    seconds = loop.time() - start
    assert [len(result[0].token_ids) for result in results] == [length for _, length in work]

    return seconds


def _request(number: int, prompt: list[int], length: int) -> GenerateRequest:
    return GenerateRequest(
        tuple(prompt), (0,), SamplingParams(max_tokens=length), Stream(1, "bench", 0, number)
    )


def theirs(bench: Bench, work: Sequence[Request], batch: int) -> float:
    with torch.inference_mode():
        return seconds_of(lambda: generate_step(bench.model, list(work), batch), bench.device)


def in_turns(bench: Bench, *sides: Callable[[], float]) -> list[float]:
    """The median of each, measured turn by turn after one round that is not counted."""
    found = [[side() for side in sides] for _ in range(bench.rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def decode(bench: Bench, batch: int, new_tokens: int, prompt_tokens: int = 128) -> None:
    prompts = prompts_of(bench, batch, prompt_tokens)
    long, short = ([(prompt, length) for prompt in prompts] for length in (new_tokens, 1))
    seconds = in_turns(
        bench,
        lambda: ours(bench, long) - ours(bench, short),
        lambda: theirs(bench, long, batch) - theirs(bench, short, batch),
    )

    # contexts of the second token to the last
    steps = range(prompt_tokens + 1, prompt_tokens + new_tokens)
    moved = sum(decode_bytes(bench.decoder, [context] * batch, DTYPE.itemsize) for context in steps)
    tokens = batch * len(steps)
    needed = Needed(moved, "bandwidth")
    row(bench, f"decode, batch {batch}", tokens, seconds, needed)
    prompt = prompts[0]
    by_hf = in_turns(
        bench, lambda: hf(bench, prompt, batch, new_tokens) - hf(bench, prompt, batch, 1)
    )
    row(bench, f"decode, batch {batch}, engine hf", tokens, by_hf, needed)

    if has_vllm():
        row(
            bench,
            f"decode, batch {batch}, against vLLM",
            tokens,
            [seconds[0], vllm(bench, long, short)],
            needed,
        )


def hf(bench: Bench, prompt: list[int], batch: int, length: int) -> float:
    """Seconds of the engine `hf` for a group of that size."""
    stream = Stream(1, "bench", 0, 0)
    wanted = SamplingParams(max_tokens=length)
    request = GenerateRequest(tuple(prompt), tuple(range(batch)), wanted, stream)

    async def run() -> None:
        async with HFEngine(
            bench.model, make_tokenizer(), version=Version(0, 0), shares_weights=True
        ) as engine:
            await engine.generate(request)

    return seconds_of(lambda: asyncio.run(run()), bench.device)


def has_vllm() -> bool:
    """Whether `.venv-vllm` has a vLLM for a CUDA device, and not that for CPUs."""
    code = "import torch, vllm; raise SystemExit(not torch.cuda.is_available())"
    return VLLM.exists() and subprocess.run([VLLM, "-c", code], capture_output=True).returncode == 0


def vllm(bench: Bench, long: list[Request], short: list[Request]) -> float:
    """Median seconds of vLLM for the tokens after the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench.model.save_pretrained(folder / "model")
        make_tokenizer(bench.decoder.vocabulary).save_pretrained(folder / "model")
        job = {"steps": [long, short] * bench.rounds, "dtype": "bfloat16", "memory": VLLM_MEMORY}
        seconds: list[float] = run_peer(
            [str(VLLM), str(ROOT / "benchmarks/peers/vllm_rollout.py"), name], folder, job
        )

    return statistics.median(seconds[::2]) - statistics.median(seconds[1::2])


def prefill(bench: Bench, batch: int, prompt_tokens: int) -> None:
    prompts = prompts_of(bench, batch, prompt_tokens)
    ids = torch.tensor(prompts, device=bench.device)

    with torch.inference_mode():
        seconds = in_turns(
            bench,
            lambda: ours(bench, [(prompt, 1) for prompt in prompts]),
            lambda: seconds_of(lambda: bench.model(input_ids=ids, logits_to_keep=1), bench.device),
        )

    needed = Needed(forward_flops(bench.decoder, [prompt_tokens] * batch, batch), "flops")
    row(bench, f"prefill, {batch} x {prompt_tokens}", batch * prompt_tokens, seconds, needed)


def update(bench: Bench, shape: str, max_tokens: int, length: int, checkpointing: bool) -> None:
    rows = 4 * (max_tokens // length)
    batch = update_batch(bench, rows, length)
    model = ready(make_model(shape, bench.device, torch.float32), torch.float32, bench.device)
    engine = TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-6),
        schedule=make_schedule("constant", total_steps=1),
        max_tokens_per_micro_batch=max_tokens,
        compute_dtype=DTYPE,
        gradient_checkpointing=checkpointing,
    )
    objective = PolicyObjective()
    seconds = in_turns(
        bench, lambda: seconds_of(lambda: engine.train_step(batch, objective), bench.device)
    )
    needed = Needed(update_flops(bench.decoder, [length] * rows, rows * (length // 2)), "flops")
    row(bench, f"update, {max_tokens} tokens a micro-batch", rows * length, seconds, needed)


def update_batch(bench: Bench, rows: int, length: int) -> Batch:
    """Half of each sequence is the prompt, half the response."""
    half = length // 2
    generator = torch.Generator().manual_seed(2)
    batch = Batch(torch.full((rows,), length - half), torch.full((rows,), half))
    vocabulary = bench.decoder.vocabulary
    batch["prompt_ids"] = torch.randint(
        2, vocabulary, (rows * (length - half),), generator=generator
    )
    batch["response_ids"] = torch.randint(2, vocabulary, (rows * half,), generator=generator)
    batch["response_mask"] = torch.ones(rows * half)
    batch["advantages"] = torch.randn(rows * half, generator=generator)
    batch["old_log_probs"] = -torch.rand(rows * half, generator=generator)

    return batch


def longtail(bench: Bench, num_prompts: int, mean: float, longest: int) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (
        torch.empty(num_prompts * 8)
        .geometric_(1 / mean, generator=generator)
        .clamp(max=longest)
        .long()
        .tolist()
    )
    prompts = [prompt for prompt in prompts_of(bench, num_prompts, 128) for _ in range(8)]
    work = list(zip(prompts, lengths, strict=True))
    batches = [min(batch, len(work)) for batch in HF_BATCHES]
    own, *peers = in_turns(
        bench,
        lambda: ours(bench, work),
        *(lambda batch=batch: theirs(bench, work, batch) for batch in batches),
    )
    row(bench, f"long tail, {len(work)} answers", sum(lengths), [own, min(peers)], None)


def whole_step(rounds: int, num_steps: int = 6) -> None:
    """On the device that `trainer.device=auto` finds."""
    work = TRAINED["gpu-135m"]
    if train_step.TRL.exists():
        train_step.measure("gpu-135m", work, rounds, num_steps)
        return

    with tempfile.TemporaryDirectory() as folder:
        write_work(Path(folder), work.shape)
        found = [
            train_step.ours(Path(folder), f"run{index}", work, num_steps) for index in range(rounds)
        ]

    seconds, tokens = (statistics.median(column) for column in zip(*found, strict=True))
    compared = "not compared with TRL, which `make bench-peers` installs"
    print(f"\nA GRPO step of gpu-135m: {seconds:.2f} s, {tokens:,.0f} tokens; {compared}")


def row(
    bench: Bench, work: str, tokens: int, seconds: Sequence[float], needed: Needed | None
) -> None:
    """seconds: ours, and theirs where there is a peer. needed: None where it has no roofline."""
    own = seconds[0]
    peer = seconds[1] if len(seconds) > 1 else None
    cells = [
        bench.name,
        work,
        f"{tokens / own:,.0f}",
        *(
            "-" if needed is None else needed.share(own, rates)
            for rates in (bench.rates, bench.sheet)
        ),
        "-" if peer is None else f"{tokens / peer:,.0f}",
        "-" if peer is None else f"{peer / own:.2f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def open_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/gpu.py measures a CUDA device, and torch finds none here. `--device cpu "
            "--shape tiny` runs the "
            "same code on the CPU, as a test of the code: its figures say nothing."
        )

    return torch.device(name)


def measure(
    shape: str,
    arguments: argparse.Namespace,
    device: torch.device,
    rates: Rates,
    sheet: Rates | None,
) -> None:
    bench = Bench(shape, make_model(shape, device, DTYPE), device, rates, sheet, arguments.rounds)
    for work in arguments.work:
        if work == "decode":
            for batch in arguments.batch:
                decode(bench, batch, arguments.new_tokens)
        elif work == "prefill":
            prefill(bench, max(1, arguments.tokens // 1024), min(1024, arguments.tokens))
        elif work == "update":
            update(
                bench, shape, arguments.tokens, min(1024, arguments.tokens), arguments.checkpointing
            )
        elif work == "longtail":
            longtail(bench, arguments.prompts, 64, arguments.longest)


def main() -> None:
    arguments = parse()
    device = open_device(arguments.device)

    command = "python benchmarks/gpu.py " + " ".join(sys.argv[1:])
    with (
        recorded(arguments.record, command.strip())
        if arguments.record
        else contextlib.nullcontext()
    ):
        run(arguments, device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["0.5b", "1.5b"], choices=SHAPES)
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256], help="of decode")
    parser.add_argument("--new-tokens", type=int, default=256, help="of decode")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of a prefill, and of a micro-batch of the update"
    )
    parser.add_argument(
        "--prompts", type=int, default=32, help="of the long tail, each with 8 answers"
    )
    parser.add_argument(
        "--longest", type=int, default=512, help="tokens that an answer of the long tail may have"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="of activations, in the update"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--record", type=Path, nargs="?", const=RESULTS, help="write a section of that file"
    )

    return parser.parse_args()


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    avoid_cudnn_attention()  # as a run does
    rates = Rates(
        copy_rate(device, 2**31 if on_gpu else 2**24),
        matmul_rate(device, DTYPE, 8192 if on_gpu else 128),
    )
    name = (
        torch.cuda.get_device_name(device)
        if on_gpu
        else f"CPU, load {os.getloadavg()[0]:.1f}: a test of the code"
    )
    print(
        f"{name}; torch {torch.__version__}; a copy moves {rates.bandwidth / 1e9:,.1f} GB/s, a "
        f"product of {DTYPE} makes"
    )
    print(f"{rates.flops / 1e12:,.2f} TFLOP/s\n")
    shares = "share of the measured rate | of the data sheet's"
    print(
        f"| shape | work | tokens/s | {shares} | the peer's tokens/s (transformers) | distflow's "
        "speed, of it |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for shape in arguments.shape:
        measure(shape, arguments, device, rates, data_sheet(name))
    if "step" in arguments.work and on_gpu:
        whole_step(arguments.rounds)


if __name__ == "__main__":
    main()
