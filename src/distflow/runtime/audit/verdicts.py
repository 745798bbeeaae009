"""Claim: a sample's verdicts are its own, and come out again."""

import time
from collections.abc import Sequence

from distflow.rewards.verdict import Score, Verdict
from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence, Sample
from distflow.runtime.audit.witness import GroupRecord

MOST = 16
TRIES = 6


def prove(evidence: Evidence) -> str | None:
    if evidence.parts.judge is None or not evidence.is_ours("reward_parts"):
        return "no built-in reward node judges" if evidence.is_written("scores") else ""
    began, seen = time.monotonic(), 0
    differing: list[tuple[Sample, str, str]] = []
    for sample in evidence.proved(MOST):
        record = evidence.records.get(int(sample["group_index"]))
        if record is None or time.monotonic() - began > evidence.budget_s:
            continue
        for name in functions_of(evidence, sample):
            if name in evidence.state.get("not_deterministic", []):
                continue
            what = _compare(evidence, record, sample, name)
            if what is not None:
                differing.append((sample, name, what))
            seen += 1
    _judge_differences(evidence, differing)
    return None if seen else "no verifier could be asked again in time, or none is deterministic"


def functions_of(evidence: Evidence, sample: Sample) -> dict[str, float]:
    """Names and weights of the verifiers of the sample's domain."""
    functions = evidence.config.reward.functions
    parts = functions.get(sample["domain"]) or functions.get("default") or ()
    return {part.name: part.weight for part in parts}


def _compare(evidence: Evidence, record: GroupRecord, sample: Sample, name: str) -> str | None:
    """What differs between the sample's verdict and a new one; raises Wrong where it was judged on other texts."""
    row = evidence.parts.rows[record.ticket.row]
    text = str(evidence.parts.tokenizer.decode(sample["response_ids"].tolist(), skip_special_tokens=True))
    own = [
        verdict
        for asked, arguments, verdict in record.judged
        if asked == name and arguments["solution_str"] == text and arguments["ground_truth"] == row.ground_truth
    ]
    if not own:
        raise Wrong(
            f"verifier '{name}' was never shown the answer of sample {sample['uid']} ({text[:80]!r}) with the ground "
            f"truth of its row ({str(row.ground_truth)[:80]!r}): the sample was judged by another's text"
        )
    held = sample["reward_parts"].get(name)
    if bool(sample["valid"]) and not any(isinstance(v, Score) and v.value == held for v in own):
        raise Wrong(
            f"sample {sample['uid']} holds {held} of verifier '{name}', which gave {_shown(own)} for its answer: "
            "verdicts sit on other samples, or a missing one was counted"
        )
    again = _ask(evidence, sample, name, text, row.ground_truth, row.extra_info or {})
    if not bool(sample["valid"]) or (isinstance(again, Score) and again.value == held):
        return None
    return f"held {held}, asked again {_shown([again])}"


def _judge_differences(evidence: Evidence, differing: Sequence[tuple[Sample, str, str]]) -> None:
    """A verifier that contradicts itself is left out from here on; one that does not was recorded wrongly."""
    for sample, name, what in differing:
        if name in evidence.state.get("not_deterministic", []):
            continue
        row = evidence.parts.rows[evidence.records[int(sample["group_index"])].ticket.row]
        text = str(evidence.parts.tokenizer.decode(sample["response_ids"].tolist(), skip_special_tokens=True))
        given = {
            _shown([_ask(evidence, sample, name, text, row.ground_truth, row.extra_info or {})]) for _ in range(TRIES)
        }
        if len(given) > 1:
            evidence.state.setdefault("not_deterministic", []).append(name)
            evidence.say(
                f"verifier '{name}' is not deterministic: asked {TRIES} times for sample {sample['uid']} it said "
                f"{', '.join(sorted(given))}. Its verdicts cannot be proven, and are left out of the audit from here on"
            )
        else:
            raise Wrong(
                f"sample {sample['uid']}: {what} by verifier '{name}', {TRIES} times the same. Verdicts were handed to "
                "other samples, a missing one was counted as a score, or the verifier depends on what it judged before"
            )


def _ask(evidence: Evidence, sample: Sample, name: str, text: str, truth: object, extra: object) -> Verdict:
    assert evidence.parts.judge is not None
    arguments = {"data_source": sample["domain"], "solution_str": text, "ground_truth": truth, "extra_info": extra}
    return evidence.parts.judge(name, arguments)


def _shown(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(
        str(verdict.value) if isinstance(verdict, Score) else f"no verdict ({verdict})" for verdict in verdicts
    )


CHECK = Check(
    "verdicts",
    "each verifier was shown the sample's own text and ground truth, its verdict sits on the sample, and comes out "
    "again",
    "verifiers of reward.functions that answer the same when asked again",
    f"equal, {MOST} samples, as far as the time allows",
    prove,
)
