"""Check: a score that a judge's store keeps is about the sample that has it."""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from distflow.audit.recorded_step import NOT_APPLICABLE, RecordedStep, Wrong, check
from distflow.audit.reward_calls import LIMIT, parts_of_domain

MOST = 16


@check(
    "judge_answers",
    "the store of a judge has an answer about the sample's own response and ground truth, by the judge's model and "
    "endpoint, and its score is the sample's",
    needs="a judge with the option store, of reward.functions",
    limit=f"equal, {MOST} samples",
)
def audit_judge_answers(recorded: RecordedStep) -> str | None:
    judges = {
        (domain, part.name): part.options
        for domain in {str(sample["domain"]) for sample in recorded.samples}
        for part in parts_of_domain(recorded, domain)
        if part.name == "judge" and part.options.get("store")
    }
    if not judges or not recorded.is_ours("reward_parts"):
        return NOT_APPLICABLE
    seen = 0
    for sample in recorded.some_samples(MOST):
        options, record = judges.get((sample["domain"], "judge")), recorded.record_of(sample)
        if options is None or record is None or sample["reward_errors"] is not None or not sample["valid"]:
            continue
        truth = recorded.run.spec.rows[record.prompt_group.row].ground_truth
        asked = [options.get("base_url", ""), options.get("model", ""), sample["responses"], truth]
        about = hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()
        with closing(sqlite3.connect(Path(str(options["store"])).expanduser(), timeout=1.0)) as connection:
            answers = connection.execute("SELECT content FROM answers WHERE about = ?", (about,)).fetchall()
        scores, score = [json.loads(content)["score"] for (content,) in answers], sample["reward_parts"]["judge"]
        seen += 1
        if not any(abs(score - each) <= LIMIT for each in scores):
            raise Wrong(
                f"sample {sample['uid']} has the judge's score {score:g}, but of its response the store "
                f"{options['store']} has {scores or 'no answer'}: an answer about another response was found, or one "
                "was changed"
            )
    return None if seen else "no sample of this process has a judge's score"
