"""Nodes that give a group its responses: sampled from the policy, or read from the data set."""

from transformers import PreTrainedTokenizerBase

from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Sample
from distflow.graph import NodeRole, node
from distflow.rollout.engine import GenerateRequest, RolloutEngine
from distflow.runtime.rollout_loop.group import Group, sample_of_row
from distflow.runtime.rollout_loop.row_loader import SAMPLES_OF_ROW
from distflow.scheduling.group_states import PromptGroup

RESPONSE_FIELDS = (
    "responses",
    "response_ids",
    "response_mask",
    "versions",
    "finish_reason",
    "truncated",
    "valid",
)
SAMPLED_FIELDS = (
    *RESPONSE_FIELDS,
    "rollout_log_probs",
    "sampling_log_probs",
    # if the engine was asked for them
    "top_ids",
    "top_log_probs",
)


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def generate(
    group: Group, rollout: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Generate responses to the group's prompt: one sample for each index in the group."""
    request = GenerateRequest(
        group.row.prompt_ids, group.wanted, group.params, group.stream, images=group.row.images
    )

    samples: list[Sample] = []
    for drawn in await rollout.generate(request):
        text = str(tokenizer.decode(list(drawn.token_ids), skip_special_tokens=True))
        samples.append(group.sample(drawn.sample, drawn, text, drawn.finish_reason or "stop"))

    return samples


@node(writes=RESPONSE_FIELDS, scope="group")
async def load_responses(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The data set's own responses instead of sampled ones (supervised fine-tuning).

    The text of a conversation keeps its special tokens, which mark the turns.
    """
    return response_of_row(group.prompt_group, group.row, tokenizer)


def response_of_row(
    prompt_group: PromptGroup, row: PromptRow, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    assert row.response_ids is not None, "an SFT pipeline's rows have responses"
    text = str(tokenizer.decode(list(row.response_ids), skip_special_tokens=row.turns is None))
    return [sample_of_row(prompt_group, row, 0, row.answer(prompt_group.version), text)]


@node(writes=RESPONSE_FIELDS, scope="group")
async def load_pairs(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The data set's pair of responses: sample 0 is the chosen one, sample 1 the rejected one."""
    return pair_of_row(group.prompt_group, group.row, tokenizer)


def pair_of_row(
    prompt_group: PromptGroup, row: PromptRow, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    samples = list[Sample]()
    for index, each in enumerate((row, row.rejected)):
        segments = each.answer(prompt_group.version)
        is_single = each.turns is None
        text = str(tokenizer.decode(list(each.response_ids or ()), skip_special_tokens=is_single))
        samples.append(sample_of_row(prompt_group, row, index, segments, text))

    return samples


setattr(load_responses, SAMPLES_OF_ROW, response_of_row)
setattr(load_pairs, SAMPLES_OF_ROW, pair_of_row)
