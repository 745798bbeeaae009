"""Nodes by domain: each domain's rows by its own settings, in the batch's order, whatever rank they
lie on."""

import inspect
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.checks.samples import samples_of
from distflow.config import load_config
from distflow.config.derived_settings import algorithm_of
from distflow.data.batch import Batch
from distflow.training.engine import OneRank
from tests.pipelines.domain_ranks import COLUMNS, DOMAINS, SETTINGS, WHITENED, mixed_batch, process
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


def test_rewards_are_those_of_the_domain_by_hand() -> None:
    batch, kept, metrics = process(mixed_batch(), OneRank(), steps=1)
    before = {sample["uid"]: sample for sample in samples_of(mixed_batch())}
    scores = {
        uid: float((s["token_level_scores"] * (s["response_mask"] > 0)).sum())
        for uid, s in before.items()
    }
    words = [s for s in before.values() if s["domain"] == "words"]
    shifted = {s["uid"]: 2 * (scores[s["uid"]] - 0.5) for s in words}
    scored = [shifted[s["uid"]] for s in words if s["valid"]]
    mean = statistics.fmean(scored)
    scale = statistics.stdev(scored) + 1e-5
    for sample in samples_of(batch):
        reward = sample["token_level_rewards"].double()
        plain = before[sample["uid"]]
        if not sample["valid"]:
            continue
        if sample["domain"] == "other":
            assert torch.equal(sample["token_level_rewards"], plain["token_level_scores"])
        elif sample["domain"] == "words":
            has_token = bool((plain["response_mask"] > 0).any())
            wanted = min(max((shifted[sample["uid"]] - mean) / scale, -1.2), 1.2) * has_token
            assert float(reward.sum()) == pytest.approx(wanted, abs=1e-5)
            assert int((reward != 0).sum()) <= 1, "it is on the last token of the policy"
        else:
            mask = plain["response_mask"] > 0
            kl = 0.3 * (plain["old_log_probs"] - plain["ref_log_prob"])
            gap = reward - torch.where(mask, plain["token_level_scores"] - kl, 0.0)
            assert float(gap.abs().max()) < 1e-5
    assert kept["reward_norm"]["domains"]["words"]["mean"] == pytest.approx(mean)
    assert metrics["reward_norm/running_mean/words"] == pytest.approx(mean)
    assert kept["kl_penalty"]["domains"]["sums"]["value"] != 0.3, "its controller moved"
    assert "actor/kl_coef/sums" in metrics and "actor/kl_coef" not in metrics
    has_token = {s["uid"]: bool((s["response_mask"] > 0).any()) for s in words}
    beyond = [
        has_token[s["uid"]] and abs((shifted[s["uid"]] - mean) / scale) > 1.2
        for s in words
        if s["valid"]
    ]
    assert metrics["reward_clip/clipped/words"] == pytest.approx(sum(beyond) / len(beyond))


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


def test_rewards_of_tokens_are_whitened_behind_the_kl_by_hand() -> None:
    """Less the mean, over the unbiased standard deviation, of the policy's tokens of the domain's
    valid samples."""
    plain, _, _ = process(
        mixed_batch(),
        OneRank(),
        steps=1,
        settings=[s.replace("whiten_rewards: true, ", "") for s in WHITENED],
    )
    batch, _, _ = process(mixed_batch(), OneRank(), steps=1, settings=WHITENED)
    words = [
        (s, w)
        for s, w in zip(samples_of(plain), samples_of(batch), strict=True)
        if s["domain"] == "words"
    ]
    counted = [
        float(reward)
        for sample, _ in words
        for reward, made in zip(sample["token_level_rewards"], sample["response_mask"], strict=True)
        if made > 0 and sample["valid"]
    ]
    mean = statistics.fmean(counted)
    scale = statistics.stdev(counted)
    assert len({round(value, 4) for value in counted}) > 4, "a KL is on every token"
    for sample, whitened in words:
        for reward, made, found in zip(
            sample["token_level_rewards"],
            sample["response_mask"],
            whitened["token_level_rewards"],
            strict=True,
        ):
            wanted = (float(reward) - mean) / scale if made > 0 and sample["valid"] else 0.0
            assert float(found) == pytest.approx(wanted, abs=1e-5)
    for one, other in zip(samples_of(plain), samples_of(batch), strict=True):
        if one["domain"] != "words":
            assert torch.equal(one["token_level_rewards"], other["token_level_rewards"])


def test_long_answers_that_are_not_right_are_left_out_of_the_loss() -> None:
    """ROLL: kept where they are right, or shorter than the threshold."""
    settings = [s.replace(", difficulty_mask: [0.2, 0.9]", "") for s in WHITENED]
    batch, _, metrics = process(mixed_batch(), OneRank(), settings=settings)
    words = [s for s in samples_of(batch) if s["domain"] == "words" and s["valid"]]
    left_out = [int((s["response_mask"] > 0).sum()) >= 4 and float(s["acc"]) < 1 for s in words]
    assert 0 < sum(left_out) < len(words)
    for sample, out in zip(words, left_out, strict=True):
        assert torch.equal(sample["loss_mask"], sample["response_mask"] * (not out))
    assert metrics["sample_mask/long_errors/words"] == pytest.approx(sum(left_out) / len(words))


def test_samples_that_are_left_out_of_baselines_too_by_hand() -> None:
    """Groups of four: all stay; one is left out; only one stays; only one has a score, which GRPO
    then keeps."""
    batch = Batch(torch.ones(16, dtype=torch.int64), torch.full((16,), 2))
    batch["prompt_ids"] = torch.ones(16, dtype=torch.int64)
    batch["response_ids"] = torch.ones(32, dtype=torch.int64)
    batch["response_mask"] = torch.ones(32)
    batch["domain"] = ["sums"] * 16
    batch["group_index"] = torch.arange(16) // 4
    batch["episode_index"] = torch.arange(16)
    batch["truncated"] = torch.tensor(
        [0, 0, 0, 0] + [1, 0, 0, 0] + [1, 1, 1, 0] + [0, 1, 0, 0]
    ).bool()
    batch["finish_reason"] = [
        "stop" if cut < 1 else "max_turns" for cut in batch["truncated"].tolist()
    ]
    batch["valid"] = torch.tensor([1, 1, 1, 1] + [1, 1, 1, 1] + [1, 1, 1, 1] + [0, 0, 0, 1]).bool()
    batch["scores"] = torch.tensor([1.0, 0, 0, 1] + [9, 2, 4, 6] + [9, 9, 9, 1] + [7, 7, 7, 3])
    batch["acc"] = batch["scores"]
    plain = [
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "algorithm.mask_truncated=true",
    ]
    none = [
        "algorithm.reward_norm={mean_level: null, std_level: null}",
        "algorithm.reward_clip=null",
    ]
    found, _, metrics = process(
        batch, OneRank(), steps=1, settings=[*plain, *none, "algorithm.mask_type=all"]
    )
    wanted = [0.5, -0.5, -0.5, 0.5] + [0, -2, 0, 2] + [0] * 4 + [0, 0, 0, 3]
    assert found["advantages"][:, 0].tolist() == wanted
    assert found["loss_mask"][:, 1].tolist() == [1.0] * 4 + [0, 1, 1, 1] + [0] * 4 + [0, 0, 0, 1]
    assert torch.equal(found["valid"], batch["valid"]), (
        "what has a score is still counted in the metrics"
    )
    assert metrics["sample_mask/truncated"] == pytest.approx(4 / 13)
    assert metrics["sample_mask/alone"] == pytest.approx(1 / 13)
    of_turns = [
        plain[-1].replace("mask_truncated", "mask_max_turns"),
        *plain[:-1],
        *none,
        "algorithm.mask_type=all",
    ]
    same, _, metrics = process(batch, OneRank(), steps=1, settings=of_turns)
    assert same["advantages"][:, 0].tolist() == wanted and metrics[
        "sample_mask/max_turns"
    ] == pytest.approx(4 / 13)
    other, _, _ = process(batch, OneRank(), steps=1, settings=[*plain, *none])
    assert other["advantages"][4:8, 0].tolist() == [3.75, -3.25, -1.25, 0.75]


def test_weights_of_samples_are_of_the_lengths_in_their_domain() -> None:
    """Linear from 1.5 to 0.5 between the shortest and the longest, over their mean."""
    plain, _, _ = process(
        mixed_batch(), OneRank(), settings=[s.replace("[1.5, 0.5]", "null") for s in SETTINGS]
    )
    batch, _, _ = process(mixed_batch(), OneRank())
    words = [s for s in samples_of(plain) if s["domain"] == "words" and s["valid"]]
    lengths = {s["uid"]: int((s["response_mask"] > 0).sum()) for s in words}
    shortest = min(lengths.values())
    longest = max(lengths.values())
    weights = {
        uid: 1.5 - (length - shortest) / (longest - shortest) for uid, length in lengths.items()
    }
    mean = statistics.fmean(weights.values())
    assert len(set(weights.values())) > 2
    for weighed, one in zip(samples_of(batch), samples_of(plain), strict=True):
        weight = weights.get(one["uid"], 0.0) / mean if one["domain"] == "words" else 1.0
        torch.testing.assert_close(weighed["advantages"], weight * one["advantages"])
