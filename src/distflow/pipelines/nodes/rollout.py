"""Nodes that write responses: sampled by the rollout engine, or read from the data set."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from distflow.data.sample import Sample, Segment
from distflow.graph import NodeRole, node
from distflow.rollout.engine import GenerateRequest, RolloutEngine
from distflow.runtime.prompt_group import Group

RESPONSE_FIELDS = ("responses", "response_ids", "response_mask", "versions", "finish_reason", "truncated", "valid")
SAMPLED_FIELDS = (*RESPONSE_FIELDS, "rollout_log_probs", "sampling_log_probs")


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def generate(group: Group, rollout: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Generate responses to the group's prompt: one sample for each index that the group wants."""
    prompt_ids = tuple(group.row.prompt_ids)
    result = await rollout.generate(GenerateRequest(prompt_ids, group.wanted, group.params, group.stream))
    return [
        group.sample(
            generation.sample,
            Segment(
                "policy",
                tuple(generation.token_ids),
                tuple(generation.rollout_log_probs),
                tuple(generation.sampling_log_probs),
                tuple(generation.versions),
            ),
            str(tokenizer.decode(generation.token_ids, skip_special_tokens=True)),
            generation.finish_reason,
        )
        for generation in result.generations
    ]


@node(writes=RESPONSE_FIELDS, scope="group")
async def load_responses(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The data set's own responses in place of sampled ones (supervised fine-tuning).

    The text of a conversation keeps its special tokens, which mark the turns.
    """
    assert group.row.response_ids is not None, "an SFT pipeline's rows have responses"
    is_plain = group.row.turns is None
    text = str(tokenizer.decode(list(group.row.response_ids), skip_special_tokens=is_plain))
    sample = group.sample(0, None, text, "stop")
    return [replace(sample, segments=[*sample.segments, *group.row.answer(group.prompt_group.version)])]
