"""Claim: a sample is what the engine answered to the row's prompt, and its text is what the tokens say."""

import torch

from distflow.audit.check import Check, Wrong
from distflow.audit.recorded_data import RecordedStep, Sample, index_of
from distflow.config.per_domain import response_limit
from distflow.data.prompts import PromptRow

MOST = 64


def prove(recorded_step: RecordedStep) -> str | None:
    if not recorded_step.is_ours("responses"):
        return "a node of the user's makes the answers"
    seen = 0
    for sample in recorded_step.proved(MOST):
        record = recorded_step.records.get(int(sample["group_index"]))
        if record is None:
            continue
        prompt_group, (_, own) = record.prompt_group, recorded_step.place_of(record.prompt_group)
        if prompt_group.row != own:
            raise Wrong(
                f"group {prompt_group.group_id} went with row {prompt_group.row} of the data, and names row {own}"
            )
        row = recorded_step.parts.rows[own]
        _same(sample, "prompt_ids", sample["prompt_ids"].tolist(), list(row.prompt_ids), "the row of its group")
        _same(sample, "domain", sample["domain"], row.domain, "the row of its group")
        _tokenised(recorded_step, sample, row)
        found = recorded_step.generation(sample)
        if found is not None:
            made = found[1]
            _same(sample, "response_ids", sample["response_ids"].tolist(), list(made.token_ids), "the engine's answer")
            recorded = torch.tensor(made.rollout_log_probs, dtype=torch.float32)
            if not torch.equal(sample["rollout_log_probs"], recorded):
                raise Wrong(f"rollout_log_probs of sample {sample['uid']} are not those that the engine gave")
            if recorded_step.is_written("prox_log_probs") and not torch.equal(sample["old_log_probs"], recorded):
                raise Wrong(f"old_log_probs of sample {sample['uid']} must be the engine's beside prox_log_probs")
            _same(sample, "versions", sample["versions"].tolist(), list(made.versions), "the engine's answer")
            if min(made.versions, default=prompt_group.version) < prompt_group.version:
                raise Wrong(
                    f"sample {sample['uid']} was asked for when version {prompt_group.version} was served, but has "
                    f"tokens of version {min(made.versions)}: the engine went back to older weights"
                )
            _ended(recorded_step, sample)
        elif row.response_ids is not None:
            _same(sample, "response_ids", sample["response_ids"].tolist(), list(row.response_ids), "the data's answer")
            full = len(row.response_ids) >= recorded_step.config.data.max_response_length
            if not full and row.response_ids[-1] not in recorded_step.parts.sampling.stop_token_ids:
                raise Wrong(f"the answer of sample {sample['uid']} does not end with a token that ends an answer")
        else:
            raise Wrong(
                f"the engine was never asked for sample {sample['uid']} (number {index_of(sample)} of its group)"
            )
        # A conversation of the data keeps its special tokens: they tell where whose turn begins.
        text = recorded_step.parts.tokenizer.decode(
            sample["response_ids"].tolist(), skip_special_tokens=row.turns is None
        )
        _same(sample, "responses", sample["responses"], text, "its tokens decoded")
        seen += 1
    return None if seen else "no sample of this step was made by this process"


def _same(sample: Sample, column: str, found: object, expected: object, source: str) -> None:
    if found != expected:
        raise Wrong(f"{column} of sample {sample['uid']} is {_short(found)}, but {source} says {_short(expected)}")


def _tokenised(recorded_step: RecordedStep, sample: Sample, row: PromptRow) -> None:
    """The prompt's tokens are its text's, with or without special tokens; one that was cut may be others."""
    tokenizer = recorded_step.parts.tokenizer
    texts = [
        tokenizer(row.prompt_text, add_special_tokens=special, verbose=False)["input_ids"] for special in (True, False)
    ]
    if list(row.prompt_ids) not in texts and len(row.prompt_ids) < recorded_step.config.data.max_prompt_length:
        raise Wrong(f"the prompt of sample {sample['uid']} is not what its text {_short(row.prompt_text)} tokenises to")


def _ended(recorded_step: RecordedStep, sample: Sample) -> None:
    """A sample is finished where its last token or its text ends it, else it must be as long as it may be."""
    sampling, ids = recorded_step.sampling(sample), sample["response_ids"].tolist()
    text = recorded_step.parts.tokenizer.decode(ids, skip_special_tokens=False)
    stopped = bool(ids) and (ids[-1] in sampling.stop_token_ids or any(stop in text for stop in sampling.stop))
    earlier = [token for token in ids[:-1] if token in sampling.stop_token_ids]
    if earlier:
        raise Wrong(f"sample {sample['uid']} went on behind the token {earlier[0]}, which ends an answer")
    expected = "stop" if stopped else "length"
    if sample["finish_reason"] != expected or bool(sample["truncated"]) == stopped:
        raise Wrong(
            f"sample {sample['uid']} counts as {'truncated' if sample['truncated'] else 'finished'} "
            f"({sample['finish_reason']}), but its {len(ids)} tokens {'end' if stopped else 'do not end'} with a stop "
            "token or text"
        )
    if sampling.max_tokens != response_limit(recorded_step.config, sample["domain"]):
        raise Wrong(f"answers may have {sampling.max_tokens} tokens, but data.max_response_length is another")
    if not stopped and len(ids) != sampling.max_tokens:
        raise Wrong(f"sample {sample['uid']} ended after {len(ids)} of {sampling.max_tokens} tokens without a stop")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:80]} … {text[-60:]}"


CHECK = Check(
    "answers",
    "prompt, tokens, versions and text of a sample are the row's and the engine's; it is finished where it ends itself",
    "samples that this process made, by the built-in generation",
    "equal",
    prove,
)
