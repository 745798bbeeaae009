"""Rows, and the prompts that they become."""

from distflow.data.dataset_columns import BadRows, RawRow
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import PromptOptions, PromptSet


def row(prompt, response: str | None = None, **changes) -> RawRow:
    values = {"origin": "f:1", "answer": "a", "domain": "d", "extra_info": {}}
    return RawRow(prompt=prompt, response=response, **{**values, **changes})


def encode(rows, tokenizer, bad: BadRows | None = None, **options) -> PromptSet:
    options = {"max_prompt_length": 100, "max_response_length": 100, **options}
    return encode_rows(rows, tokenizer, PromptOptions(**options), bad or BadRows())
