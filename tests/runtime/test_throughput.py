"""Tokens per second by phase: of a whole run against its spans and samples, and over ranks with
unequal shares."""

import pytest

from distflow.observe.metrics import find_metric
from distflow.observe.run_reader import read_samples
from distflow.observe.run_reader import read_spans as spans_of
from tests.e2e.runs import Playground
from tests.ranks import run_ranks


def test_over_ranks_it_is_the_ratio_of_the_sums(tmp_path):
    run_ranks("tests.runtime.throughput_worker", 2, tmp_path)


@pytest.mark.slow
def test_of_a_run_it_is_tokens_by_the_time_of_each_phase(tmp_path):
    """The validations that the engine decodes between steps do not count."""
    ground = Playground(tmp_path)
    validates = (
        "trainer.test_freq=1",
        f"data.val_files={tmp_path}/rows.jsonl",
        "data.val_max_samples=3",
    )
    run = ground.run(
        "grpo",
        "trainer.total_training_steps=3",
        *validates,
        "algorithm.recompute_old_log_probs=true",
    )
    decoding = [span for span in spans_of(run.folder)["engine"] if span.what == "train"]

    for step, metrics in enumerate(run.metrics(), 1):
        rows = read_samples(run.folder, step)
        responses = sum(int(row["response_length"]) for row in rows)
        tokens = responses + sum(int(row["prompt_length"]) for row in rows)

        for phase in ("train_step", "recompute_logp", "ref_logp"):
            assert metrics[f"throughput/{phase}"] == pytest.approx(
                tokens / metrics[f"timing_s/{phase}"]
            )

        seconds = sum(span.end - span.start for span in decoding if span.version == step - 1)
        assert metrics["throughput/rollout"] == pytest.approx(responses / seconds, rel=1e-3)
        speeds = {name for name in metrics if name.startswith("throughput/")}
        assert len(speeds) == 5 and all(
            (metric := find_metric(name)) and metric.unit == "tokens/s" for name in speeds
        )
        assert not {name for name in metrics if "decode" in name}
