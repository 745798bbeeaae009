"""Two clients of `distflow serve --tinker` that sample from an adapter each: at once, and one after
the other; and the server's memory as more versions are sampled from.

    python benchmarks/tinker_adapters.py [--rounds 5]

Both adapters have rank 32 over one base in float32. A client asks for responses of 128 tokens to
one prompt, which differs each time. Few responses of a large model are bound by memory: each step
reads all weights. The two ways take turns. `busy beside`: cores that processes other than ours kept
busy.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import tinker
from fairness import Beside
from tinker_api import RANK, client_of
from workload import Shape, Work, write_work

TOKENS = 128
WORKS = {
    "100 M, 1 response": (Shape(1024, 8), 1),
    "100 M, 4 responses": (Shape(1024, 8), 4),
    "1 M, 32 responses": (Shape(128, 4), 32),
}
"""The decoder, and the responses of each client."""


def sample(sampler: Any, count: int, number: int) -> Any:
    """number: of the prompt."""
    prompt = tinker.ModelInput.from_ints([2 + (7 * number + place) % 900 for place in range(16)])
    params = tinker.SamplingParams(max_tokens=TOKENS, temperature=1.0)
    return sampler.sample(prompt, count, params)


def version_of(model: Any, number: int) -> Any:
    """A sampler of the model after one more step."""
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([3, 4 + number, 5]),
        loss_fn_inputs={"target_tokens": [4 + number, 5, 6], "weights": [1.0] * 3},
    )
    passed = model.forward_backward([datum], "cross_entropy")
    model.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    passed.result()
    return model.save_weights_and_get_sampling_client().result()


def server_bytes() -> int:
    """Of all processes that this one started."""
    total = 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        status = Path(f"/proc/{child}/status").read_text()
        total += 1024 * int(status.partition("VmRSS:")[2].split()[0])
    return total


def measure(name: str, rounds: int) -> None:
    shape, count = WORKS[name]
    seconds: dict[str, list[float]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_work(folder, shape)
        with client_of(folder, Work(shape, TOKENS)) as service:
            models = []
            for seed in (1, 2):
                created = service.create_lora_training_client(f"{folder}/model", RANK, seed=seed)
                models.append(created.result())
            samplers = [version_of(model, 0) for model in models]

            for index in range(-1, rounds):
                others = Beside()
                start = time.perf_counter()
                for number, sampler in enumerate(samplers):
                    sample(sampler, count, 4 * index + number).result()
                middle = time.perf_counter()
                asked = []
                for number, sampler in enumerate(samplers):
                    asked.append(sample(sampler, count, 4 * index + 2 + number))
                for future in asked:
                    future.result()

                if index < 0:  # both warmed up
                    continue
                seconds["one after the other"].append(middle - start)
                seconds["at once"].append(time.perf_counter() - middle)
                beside[name].append(others.cores())

            memory = [server_bytes()]
            for number in (1, 2):
                sample(version_of(models[0], number), count, number).result()
                memory.append(server_bytes())

    slow = statistics.median(seconds["one after the other"])
    for way, found in seconds.items():
        median = statistics.median(found)
        rate = 2 * count * TOKENS / median
        spread = f"{median:.2f} ({min(found):.2f}-{max(found):.2f})"
        print(f"| {name} | {way} | {spread} | {rate:.0f} | {slow / median:.2f} |", flush=True)
    sizes = ", ".join(f"{each / 1e9:.2f}" for each in memory)
    print(f"memory with 2, 3 and 4 versions: {sizes} GB; busy beside {max(beside[name]):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds

    print(f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| work | clients | s | tokens/s | speed |\n|---|---|---|---|---|")
    for name in WORKS:
        measure(name, rounds)


if __name__ == "__main__":
    main()
