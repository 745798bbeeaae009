"""The metrics of a step, of any shares of two ranks, against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch
from distflow.runtime.sample_rows import sample_rows
from distflow.runtime.step_metrics import Figures, batch_metrics, group_metrics
from distflow.runtime.validation_results import ValidationResults, pass_at_k
from distflow.scheduling.group_states import GroupCounts
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.references import step_metrics as reference
from tests.references.step_metrics import Row

STEP = 4


def batch_of(drawn: Drawn, versions: list[int]) -> Batch:
    """versions: of the tokens by their place in a response."""
    bs, length = drawn.mask.shape
    prompts = torch.arange(bs) % 3 + 1
    batch = Batch(prompts, torch.full((bs,), length))
    batch["response_mask"] = drawn.mask.flatten().float()
    batch["token_level_scores"] = drawn["rewards"].flatten()
    batch["advantages"] = drawn["advantages"].flatten()
    of_tokens = torch.tensor(versions).expand(bs, length)
    batch["versions"] = of_tokens.where(drawn.mask > 0, -1).flatten()
    for name in ("valid", "truncated", "acc"):
        batch[name] = getattr(drawn, name)
    batch["group_index"] = drawn.group
    batch["domain"] = drawn.domains
    batch["reward_parts"] = drawn.parts
    for name in ("uid", "prompts", "responses", "ground_truth", "finish_reason"):
        batch[name] = [f"{name} {row}" for row in range(bs)]
    return batch


def rows_of(drawn: Drawn) -> list[Row]:
    found = []
    for row in range(len(drawn)):
        score = float(drawn.of_tokens(row, "rewards").sum())
        found.append(
            Row(
                prompt_length=row % 3 + 1,
                response_length=drawn.mask.shape[1],
                is_truncated=bool(drawn.truncated[row]),
                group=int(drawn.group[row]),
                domain=drawn.domains[row],
                score=score if drawn.valid[row] else None,
                acc=float(drawn.acc[row]),
                parts=drawn.parts[row],
            )
        )

    return found


@settings(max_examples=60)
@given(
    drawn=batches().filter(len),
    versions=st.lists(st.integers(0, STEP), min_size=6, max_size=6),
    first=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_a_step(drawn, versions, first):
    batch = batch_of(drawn, versions[: drawn.mask.shape[1]])
    shares = [batch.select(rows) for rows in parts_of(drawn, first)]
    figures = Figures.joined([Figures.of(share) for share in shares])
    found = batch_metrics(figures)
    wanted = reference.of_step(rows_of(drawn))
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert figures.num_tokens == int(batch.lengths("sequence").sum())

    of_tokens = batch["versions"][drawn.mask > 0].tolist()
    counts = GroupCounts(issued=0, running=0, complete=0, consumed=0, dropped={})
    aged = group_metrics(counts, figures.versions, STEP)

    if of_tokens:
        ages = reference.staleness(of_tokens, STEP)
        assert {name: aged[name] for name in ages} == pytest.approx(ages)

    assert len([name for name in aged if "staleness/" in name]) == (
        STEP - min(of_tokens) + 1 if of_tokens else 0
    )


@settings(max_examples=40)
@given(drawn=batches().filter(len))
def test_a_row_of_the_samples_file(drawn):
    batch = batch_of(drawn, [STEP] * drawn.mask.shape[1])

    # no mean reads what stands outside the mask
    batch["advantages"] = batch.flat("advantages").nan_to_num(0.0, 0.0, 0.0)
    batch["loss_mask"] = (drawn.mask * (drawn["selected"] > 0)).flatten()

    for row, found in enumerate(sample_rows(batch)):
        advantages = drawn.of_tokens(row, "advantages").tolist()
        kept = drawn.of_tokens(row, "selected").tolist()
        assert found["advantage"] == pytest.approx(
            reference.mean_over_tokens(advantages), rel=1e-5, abs=1e-6
        )
        assert found["masked"] == pytest.approx(1.0 - reference.mean_over_tokens(kept))
        score = float(drawn.of_tokens(row, "rewards").sum())
        assert found["score"] == (pytest.approx(score) if drawn.valid[row] else None)


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    found = pass_at_k(len(outcomes), sum(outcomes), k)
    assert found == pytest.approx(reference.pass_at_k(outcomes, k), abs=1e-12)


@settings(max_examples=30)
@given(
    drawn=st.lists(
        st.tuples(
            st.sampled_from(("maths", "code")), st.lists(st.booleans(), min_size=4, max_size=4)
        ),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 6),
)
def test_a_validation(drawn, cut):
    """The first response to a prompt is greedy, the others are sampled; two parts are joined."""
    parts = []
    for own in (drawn[:cut], drawn[cut:]):
        greedy: dict[tuple[str, str], list[list[bool]]] = {}
        sampled: dict[tuple[str, str], list[list[bool]]] = {}
        for domain, outcomes in own:
            greedy.setdefault((domain, ""), []).append(outcomes[:1])
            sampled.setdefault((domain, ""), []).append(outcomes[1:])
        parts.append(ValidationResults(greedy, sampled, 1, []))

    found = ValidationResults.joined(parts).metrics()
    assert found["val/errors"] == 2.0

    for name in ("all", *{domain for domain, _ in drawn}):
        own = [outcomes for domain, outcomes in drawn if name in ("all", domain)]
        rights = [outcomes[0] for outcomes in own]
        assert found[f"val_correct/{name}/mean"] == pytest.approx(sum(rights) / len(own))
        all_sampled = [right for outcomes in own for right in outcomes[1:]]
        assert found[f"val_correct/{name}/mean@3"] == pytest.approx(
            sum(all_sampled) / len(all_sampled)
        )

        for k in (1, 2, 3):
            wanted = sum(reference.pass_at_k(outcomes[1:], k) for outcomes in own) / len(own)
            assert found[f"val_correct/{name}/pass@{k}"] == pytest.approx(wanted)
