"""Nodes of teachers, which score the policy's samples: one for each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.config import Config
from distflow.config.keys.distill import teachers_of
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.graph import Pipeline, node
from distflow.training.torch_engine import TeacherScorer

_ROUNDING = 1e-3
"""Of a log-prob in bfloat16, and of the sum of several."""


def score_by_teachers(pipeline: Pipeline, config: Config) -> None:
    """Add the nodes of all teachers; none if there are none."""
    columns = ["teacher_log_probs", "kl_weights"]
    if config.distill.signal == "top_k":
        columns += ["teacher_top_ids", "teacher_top_log_probs"]
    teachers = teachers_of(config.distill)
    named = [domain for teacher in teachers.values() for domain in teacher.domains]

    after = list[str]()
    for name, teacher in teachers.items():
        pipeline.add_node(
            f"score_by_{name}",
            score_by_teacher,
            after,
            engine=name,
            writes=tuple(columns),
            only_forward_compute=True,
            phase="teacher_logp",
            domains=teacher.domains,
            others=() if teacher.domains else tuple(named),
        )
        after = [f"score_by_{name}"]


@node(
    reads=(
        *("prompt_ids", "response_ids", "?forks", "?images", "domain"),
        *("?teacher_log_probs", "?kl_weights", "?teacher_top_ids", "?teacher_top_log_probs"),
    )
)
def score_by_teacher(
    batch: Batch, engine: TeacherScorer, *, domains: Sequence[str] = (), others: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The teacher's log-probs of the samples of these domains, beside those of the teachers before
    it. domains: empty for all that are not `others`."""
    rows = list[int]()
    for row, domain in enumerate(batch["domain"]):
        if domain in domains if domains else domain not in others:
            rows.append(row)

    # on every rank, even without rows
    scored = engine.score(batch.select(rows))
    scored["kl_weights"] = torch.ones(int(scored.lengths("response").sum()))
    check_scores(scored, [batch["uid"][row] for row in rows])

    is_own = torch.isin(batch.rows(), torch.tensor(rows, dtype=torch.int64))
    found = dict[str, Tensor]()
    for name in scored.names:
        own = scored.flat(name)
        if name in batch:
            found[name] = batch.flat(name).clone()
        else:
            missing = -torch.inf if name == "teacher_top_log_probs" else 0
            found[name] = own.new_full((len(is_own), *own.shape[1:]), missing)
        found[name][is_own] = own

    return found


def check_scores(scored: Batch, names: Sequence[str]) -> None:
    """Raises UserError, with sample and token, for log-probs of a teacher that are none. names: of
    the samples."""
    log_probs = scored.flat("teacher_log_probs")
    wrong = ~(log_probs <= _ROUNDING)
    what = "is no log-prob"
    if "teacher_top_log_probs" in scored and not bool(wrong.any()):
        top = scored.flat("teacher_top_log_probs")
        log_probs = top.double().exp().sum(-1)
        wrong = ~((top <= _ROUNDING).all(-1) & (log_probs <= 1 + _ROUNDING))
        what = "is the probability of its likeliest tokens together"
    if not bool(wrong.any()):
        return

    place = int(wrong.nonzero()[0])
    row = int(scored.rows()[place])
    token = place - int(scored.lengths("response")[:row].sum())
    raise UserError(
        f"distill: by the teacher, {float(log_probs[place]):g} {what} at token {token} of sample "
        f"{names[row]}; its weights or its answers are broken. Choose another teacher"
    )
