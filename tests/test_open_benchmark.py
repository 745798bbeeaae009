"""The open benchmark's proofs: an honest loop passes, and each system that does other work than it
reports is refused by the proof that is named."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

OPEN = Path(__file__).parents[1] / "benchmarks" / "open"
TINY = {"hidden": 64, "layers": 1, "updates": 3, "rows": 4, "target": 0.0, "saved_every": 2}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which are scripts beside each other."""
    places = [str(OPEN), str(OPEN / "adapters")]
    sys.path[:0] = places
    import proofs
    import tasks
    import with_plain

    class Modules:
        Plain = with_plain.Plain
        Refused = proofs.Refused
        TASKS = tasks.TASKS
        prove = staticmethod(proofs.prove)
        read_work = staticmethod(proofs.read_work)
        write_inputs = staticmethod(tasks.write_inputs)

    yield Modules
    sys.path[:] = [place for place in sys.path if place not in places]


def run(bench: Any, tmp_path: Path, system: Any, task: str, **changes: Any) -> dict[str, float]:
    tiny = replace(bench.TASKS[task], **{**TINY, **changes})
    folder = tmp_path / "inputs"
    bench.write_inputs(tiny, folder)
    out = tmp_path / "out"
    system(folder, out).run()
    found: dict[str, float] = bench.prove(bench.read_work(folder, out), "float32")
    return found


@pytest.mark.parametrize("task", ["grpo-1m", "sft-1m", "dpo-1m"])
def test_an_honest_loop_passes(bench, tmp_path, task):
    found = run(bench, tmp_path, bench.Plain, task)
    assert found["distance"] < 1e-4
    assert found["tokens"] > 0


def test_inputs_are_the_same_bits_each_time(bench, tmp_path):
    task = replace(bench.TASKS["sft-1m"], **TINY)
    first = bench.write_inputs(task, tmp_path / "first")
    assert bench.write_inputs(task, tmp_path / "again") == first
    assert bench.write_inputs(replace(task, seed=1), tmp_path / "other") != first


def other_order(plain: Any) -> Any:
    class Shuffled(plain):  # type: ignore[misc]
        def run(self) -> None:
            path = self.folder / "rows.jsonl"
            lines = path.read_text().splitlines()
            honest = [*lines]
            random.Random(1).shuffle(lines)
            path.write_text("\n".join(lines))
            super().run()
            path.write_text("\n".join(honest))

    return Shuffled


def padded_loss(plain: Any) -> Any:
    class Padded(plain):  # type: ignore[misc]
        def log_probs(self, *given: Any) -> tuple[Tensor, Tensor]:
            log_probs, mask = super().log_probs(*given)
            return log_probs, torch.ones_like(mask)

    return Padded


def long_ones_dropped(plain: Any) -> Any:
    class Drops(plain):  # type: ignore[misc]
        def loss(self, rows: Rows) -> Tensor:
            self.cut = torch.tensor([[len(row["response_ids"]) == 8] for row in rows])
            return super().loss(rows)

        def log_probs(self, *given: Any) -> tuple[Tensor, Tensor]:
            log_probs, mask = super().log_probs(*given)
            return log_probs, torch.where(self.cut, 0.0, mask)

    return Drops


def half_trained(plain: Any) -> Any:
    class Half(plain):  # type: ignore[misc]
        def loss(self, rows: Rows) -> Tensor:
            is_first = not self.optimizer.state
            return super().loss(rows if is_first else rows[: len(rows) // 2])

    return Half


def colder(plain: Any) -> Any:
    class Colder(plain):  # type: ignore[misc]
        def generate(self, inputs: Any) -> Tensor:
            ids: Tensor = self.model.generate(
                **inputs, do_sample=True, top_k=4, top_p=1.0, max_new_tokens=8
            )
            return ids

    return Colder


def better_rewards(plain: Any) -> Any:
    class Better(plain):  # type: ignore[misc]
        def reward(self) -> Any:
            return lambda text, answer: float(len(text) % 2)

    return Better


def start_saved(plain: Any) -> Any:
    class Start(plain):  # type: ignore[misc]
        def run(self) -> None:
            super().run()
            last = self.out / "weights" / str(self.task["updates"])
            self.load().save_pretrained(last)

    return Start


def one_update_less(plain: Any) -> Any:
    class Less(plain):  # type: ignore[misc]
        def run(self) -> None:
            super().run()
            path = self.out / "updates.jsonl"
            lines = path.read_text().splitlines()
            path.write_text("\n".join(lines[:-1]))

    return Less


def ends_left_out(plain: Any) -> Any:
    class Cut(plain):  # type: ignore[misc]
        def sampled(self, rows: Rows) -> Rows:
            recorded: Rows = super().sampled(rows)
            for row in recorded:
                row["response_ids"] = row["response_ids"][:3]
            return recorded

    return Cut


CHEATS = {
    "rows in another order": ("sft-1m", other_order, "rows"),
    "an update less": ("grpo-1m", one_update_less, "rows"),
    "padding in the loss": ("sft-1m", padded_loss, "first step"),
    "padding in the loss of pairs": ("dpo-1m", padded_loss, "weights"),
    "long responses not trained on": ("grpo-1m", long_ones_dropped, "first step"),
    "half of the rows not trained on": ("sft-1m", half_trained, "weights"),
    "another law of sampling": ("grpo-1m", colder, "sampling"),
    "other rewards": ("grpo-1m", better_rewards, "rewards"),
    "the weights of the start": ("dpo-1m", start_saved, "weights"),
    "responses cut": ("grpo-1m", ends_left_out, "responses"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_other_work_than_reported_is_refused(bench, tmp_path, cheat):
    task, change, proof = CHEATS[cheat]
    with pytest.raises(bench.Refused, match=f"^{proof}:"):
        run(bench, tmp_path, change(bench.Plain), task)


def test_a_result_below_the_target_is_refused(bench, tmp_path):
    with pytest.raises(bench.Refused, match=r"^target: .*0\.99"):
        run(bench, tmp_path, bench.Plain, "sft-1m", target=0.99)


def test_records_that_cannot_be_read_are_refused(bench, tmp_path):
    folder = tmp_path / "inputs"
    bench.write_inputs(replace(bench.TASKS["sft-1m"], **TINY), folder)
    with pytest.raises(bench.Refused, match=r"updates\.jsonl"):
        bench.read_work(folder, tmp_path)
