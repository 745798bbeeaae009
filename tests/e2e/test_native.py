"""A run says by which code its tokens were made, and one that goes on without it is told."""

import pytest

from distflow.models.cpu_kernels import build
from tests.e2e.runs import Playground


@pytest.mark.slow
@pytest.mark.skipif(not build.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)")
def test_in_bfloat16_the_engine_rounds_as_the_trainer_does(tmp_path):
    """Products are summed in another order on another processor, so a few roundings differ: a
    seventieth of what an engine all in bfloat16 differs by was the most that was seen."""
    (tmp_path / "eager").mkdir()
    bfloat16 = ("actor_rollout_ref.model.dtype=bfloat16", "trainer.total_training_steps=2")
    native = Playground(tmp_path).run("grpo", *bfloat16)

    eager = Playground(tmp_path / "eager").run(
        "grpo", *bfloat16, "actor_rollout_ref.rollout.enforce_eager=true"
    )
    for ours, all_in_bfloat16 in zip(native.metrics(), eager.metrics(), strict=True):
        assert all_in_bfloat16["mismatch/mean_abs"] > 1e-3
        assert ours["mismatch/mean_abs"] < all_in_bfloat16["mismatch/mean_abs"] / 20
