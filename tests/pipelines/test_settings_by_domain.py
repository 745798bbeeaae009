"""Nodes by domain: each domain's rows by its own settings, in the batch's order, whatever rank they
lie on."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.checks.samples import samples_of
from distflow.config import load_config
from distflow.config.derived_settings import algorithm_of
from distflow.training.engine import OneRank
from tests.pipelines.domain_ranks import COLUMNS, DOMAINS, SETTINGS, mixed_batch, process
from tests.ranks import run_ranks
from tests.references.advantages import REFERENCES
from tests.references.samples import Sample

ESTIMATORS = {"sums": "grpo", "words": "gae", "other": "reinforce_plus_plus"}


@pytest.mark.slow
def test_advantages_moments_and_coefficients_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    run_ranks("tests.pipelines.domain_ranks", 2, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["apart"]) == 2 * len(COLUMNS) and max(found["apart"].values()) < 1e-5
        assert (
            flat(found["own"]) == pytest.approx(flat(found["kept"]), rel=1e-9)
            and len(flat(found["own"])) == 13
        )


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by their place."""
    found: dict[str, float] = {}
    for name, value in state.items():
        found |= (
            flat(value, f"{prefix}{name}/")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )

    return found


@pytest.mark.parametrize("domain", ESTIMATORS)
def test_each_domain_has_the_advantages_of_its_own_estimator(domain: str) -> None:
    """By the references, of the domain's rewards alone."""
    settings = [*SETTINGS[:-1], SETTINGS[-1].replace(" length_weight: [1.5, 0.5],", "")]
    batch, _, _ = process(mixed_batch(), OneRank(), settings=settings)
    algorithm = algorithm_of(load_config("rlvr", settings, complete=False).config, domain)
    assert algorithm.adv_estimator == ESTIMATORS[domain]
    rows = [row for row, name in enumerate(DOMAINS) if name == domain]
    samples = [samples_of(batch)[row] for row in rows]
    scored = [sample for sample in samples if sample["valid"]]
    reference = REFERENCES[algorithm.adv_estimator]
    known = inspect.signature(reference).parameters
    options = {name: value for name, value in vars(algorithm).items() if name in known}

    wanted = reference([of_policy(sample) for sample in scored], **options)
    for sample, advantages, returns in zip(scored, *wanted, strict=True):
        own = sample["response_mask"] > 0
        assert sample["advantages"][own].tolist() == pytest.approx(advantages, abs=1e-5)
        assert sample["returns"][own].tolist() == pytest.approx(returns, abs=1e-5)

    assert any(map(any, wanted[0]))


def of_policy(sample: Any) -> Sample:
    """What the references read of a sample: the policy's tokens."""
    own = sample["response_mask"] > 0
    number = int(own.sum())
    rewards = sample["token_level_rewards"][own].tolist()
    values = sample["values"][own].tolist() if "values" in sample else [0.0] * number
    turns = [0] * number
    return Sample(int(sample["group_index"]), rewards, values, turns, turns, False, 0.0)


def test_samples_are_left_out_of_the_loss_where_their_domain_says_so() -> None:
    batch, _, metrics = process(mixed_batch(), OneRank())

    # of right answers of the valid samples, by hand from `acc` and `valid`
    share = {1: 0.0, 3: 0.5}

    for sample in samples_of(batch):
        group = int(sample["group_index"])
        counts = bool(sample["valid"])
        kept = sample["domain"] != "words" or 0.2 < share[group] < 0.9
        assert torch.equal(sample["loss_mask"], sample["response_mask"] * counts * kept), sample[
            "uid"
        ]

    assert 0 < metrics["sample_mask/difficulty/words"] < 1
