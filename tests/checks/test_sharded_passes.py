"""The checks over a model whose weights lie on two ranks; each has asserted what it can see of its
own part."""

import pytest

from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model


@pytest.mark.slow
def test_ranks_that_share_a_model_prove_it_together(tmp_path):
    write_tiny_model(tmp_path / "model", "qwen3")  # 99 rows of embeddings: parts of unlike size
    run_ranks("tests.checks.passes_worker", 2, tmp_path)
