"""Keys of `data`."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from distflow.launch.data_sets import train_sources
from distflow.models.loading import load_tokenizer
from tests.e2e.keys.case import Case, a_run, allowed, refused, the_prompts, the_spec
from tests.e2e.keys.lab import Lab, Run

LONG = "data.train_files={lab}/long.jsonl"
UNFILTERED = (LONG, "data.filter_overlong_prompts=false")
VALIDATED = "data.val_files={lab}/val.jsonl"
CHAT = "data.prompt_format=chat"
LONGER = ("trainer.total_training_steps=6",)


def texts(side: Any) -> list[str]:
    return [row.prompt_text for row in side[0]]


def num_rows(before_num: int, after_num: int, of: int = 0) -> Callable[[Any, Any], None]:
    def check(before: Any, after: Any) -> None:
        assert (len(before[of]), len(after[of])) == (before_num, after_num)

    return check


def rows_have(attribute: str, before_value: Any, after_value: Any) -> Callable[[Any, Any], None]:
    def check(before: Any, after: Any) -> None:
        assert getattr(before[0][1], attribute) == before_value
        assert getattr(after[0][1], attribute) == after_value

    return check


def text_of_second(before_text: str, after_text: str) -> Callable[[Any, Any], None]:
    return rows_have("prompt_text", before_text, after_text)


def passes_over(before: Run, after: Run) -> None:
    assert not any("too_hard" in name for name in before.steps[-1])
    assert after.steps[-1]["async/dropped/too_hard"] > 0 and rows_in_order(before) == rows_in_order(
        after
    ), "the first time"


def reads_when_its_turn_comes(before: Run, after: Run) -> None:
    """Of 13 rows the long one is left out before the start, or when the epoch reaches it."""
    assert not any("overlong" in name for step in before.steps for name in step)
    assert after.steps[-1]["async/dropped/overlong"] == 1
    assert len({row["prompt"] for row in after.samples()}) == 4


def other_answer_to_learn(before: Run, after: Run) -> None:
    assert all(row["response"].isdigit() for row in before.samples())
    assert all(row["response"].startswith("y") for row in after.samples())


def validates(before: Run, after: Run) -> None:
    assert not before.validations and list(after.validations) == [2]


def cut_prompt(kept: Callable[[str], str]) -> Callable[[Any, Any], None]:
    def check(before: Any, after: Any) -> None:
        assert isinstance(before, Exception) and "data.truncation" in str(before)
        assert after[0][12].prompt_text == kept("0123456789" * 3)

    return check


def batch_of(before: Run, after: Run) -> None:
    assert (len(before.samples()), len(after.samples())) == (16, 8)


def no_longer_than(before: Run, after: Run) -> None:
    assert (
        before.column("rollout/max_response_length")[0] == 8
        and after.column("rollout/max_response_length")[0] == 3
    )
    assert max(row["response_length"] for row in after.samples()) == 3


def rows_in_order(run: Run) -> list[int]:
    return [int(row["prompt"].rpartition(" ")[2].partition("+")[0]) for row in run.samples()[::4]]


def in_file_order(before: Run, after: Run) -> None:
    assert rows_in_order(after) == [0, 1, 2, 3] != rows_in_order(before)


def in_another_order(before: Run, after: Run) -> None:
    assert rows_in_order(before) != rows_in_order(after)


class WatchedTokenizer:
    """A tokenizer that knows which threads it worked in; `together` of them must meet."""

    def __init__(self, tokenizer: Any, together: int) -> None:
        self.tokenizer = tokenizer
        self.threads = set[str]()
        self._meeting = threading.Barrier(together, timeout=30)

    def __call__(self, texts: Sequence[str], **settings: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self._meeting.wait()
        return self.tokenizer(texts, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def threads_and_rows(
    lab: Lab, base: str, changes: Sequence[str]
) -> tuple[set[str], list[tuple[int, ...]]]:
    """Which threads tokenised, and the tokens. 1600 rows are 4 chunks."""
    config = lab.config(base, changes)
    workers = config.data.num_loader_workers
    tokenizer = WatchedTokenizer(
        load_tokenizer(config.actor_rollout_ref.model.path or ""), max(workers, 1)
    )
    (source,) = train_sources(config, scored=True)
    prompts = source.encode(source.read(lab.folder), tokenizer)  # type: ignore[arg-type]
    return tokenizer.threads, [row.prompt_ids for row in prompts]


def same_rows_by_other_threads(before: Any, after: Any) -> None:
    assert len(before[0]) == 2 and all(name.startswith("distflow-tokenise") for name in before[0])
    assert after[0] == {threading.current_thread().name}
    assert before[1] == after[1] and len(after[1]) == 1600


def tagged(before: Any, after: Any) -> None:
    assert (
        {row.tag for row in before[1]} == {""} and after[1][1].tag == "x1" and after[0][1].tag == ""
    )


def overlaps(before: Any, after: Any) -> None:
    assert (
        before.warnings[0].startswith("6 of 6 validation prompts are trained on")
        and after.warnings == ()
    )


def prompts_case(
    key: str, value: str, outcome: str, check: Any, given: tuple[str, ...] = (), base: str = "grpo"
) -> Case:
    return Case(
        f"data.{key}",
        f"data.{key}={value}",
        outcome,
        check,
        base=base,
        given=given,
        look=the_prompts,
    )


CASES = (
    prompts_case(
        "train_files", "{lab}/long.jsonl", "rows", num_rows(12, 13), ("data.max_prompt_length=30",)
    ),
    Case(
        "data.val_files", (VALIDATED, "trainer.test_freq=2"), "validations", validates, look=a_run
    ),
    prompts_case("prompt_key", "other_prompt", "prompts", text_of_second("say 1+2=", "what is 1?")),
    prompts_case(
        "answer_key", "other_answer", "ground truths", rows_have("ground_truth", "3", "x1")
    ),
    Case(
        "data.response_key",
        "data.response_key=other_response",
        "responses",
        other_answer_to_learn,
        base="sft",
    ),
    prompts_case(
        "messages_key",
        "other_messages",
        "conversations",
        text_of_second("<bos>user: sayassistant: ", "<bos>user: whatassistant: "),
        ("data.train_files={lab}/talks.jsonl", "data.max_prompt_length=64"),
        base="sft",
    ),
    prompts_case(
        "tools_key",
        "other_tools",
        "prompts",
        text_of_second(
            "<bos>user: say 1+2=assistant: ", '<bos>user: say 1+2=assistant: [{"name": "add"}]'
        ),
        (CHAT, "data.max_prompt_length=64"),
    ),
    prompts_case(
        "apply_chat_template_kwargs",
        "{date_string: today}",
        "prompts",
        text_of_second("<bos>user: say 1+2=assistant: ", "<bos>user: say 1+2=assistant: today"),
        (CHAT, "data.max_prompt_length=64"),
    ),
    prompts_case("domain_key", "other_source", "domains", rows_have("domain", "free", "elsewhere")),
    prompts_case("tag_key", "other_answer", "tags of validation rows", tagged, (VALIDATED,)),
    prompts_case(
        "prompt_format",
        "chat",
        "prompts",
        text_of_second("say 1+2=", "<bos>user: say 1+2=assistant: "),
        ("data.max_prompt_length=64",),
    ),
    prompts_case(
        "prompt_template", "'Q:{prompt}'", "prompts", text_of_second("say 1+2=", "Q:say 1+2=")
    ),
    prompts_case(
        "system_prompt",
        "be brief",
        "prompts",
        text_of_second(
            "<bos>user: say 1+2=assistant: ", "<bos>system: be briefuser: say 1+2=assistant: "
        ),
        (CHAT, "data.max_prompt_length=64"),
    ),
    prompts_case(
        "enable_thinking",
        "true",
        "prompts",
        text_of_second("<bos>user: say 1+2=assistant: ", "<bos>user: say 1+2=assistant: <think>"),
        (CHAT, "data.max_prompt_length=64"),
    ),
    Case(
        "data.train_batch_size",
        "data.train_batch_size=2",
        "samples of a step",
        batch_of,
        given=("actor_rollout_ref.actor.ppo_mini_batch_size=2",),
    ),
    prompts_case("max_prompt_length", "30", "rows", num_rows(12, 13), (LONG,)),
    Case(
        "data.max_response_length",
        "data.max_response_length=3",
        "lengths of responses",
        no_longer_than,
    ),
    prompts_case(
        "filter_overlong_prompts",
        "false",
        "an error that names the row",
        refused("30 tokens"),
        (LONG,),
    ),
    prompts_case(
        "truncation",
        "left",
        "the end of the prompt is left",
        cut_prompt(lambda text: text[-24:]),
        UNFILTERED,
    ),
    prompts_case(
        "truncation", "right", "its beginning", cut_prompt(lambda text: text[:24]), UNFILTERED
    ),
    prompts_case(
        "truncation", "middle", "both", cut_prompt(lambda text: text[:12] + text[-12:]), UNFILTERED
    ),
    prompts_case(
        "bad_rows",
        "skip",
        "the others are read",
        allowed("bad.jsonl", "prompt"),
        ("data.train_files={lab}/bad.jsonl",),
    ),
    Case(
        "data.lazy",
        "data.lazy=true",
        "a row that is too long is dropped when its turn comes",
        reads_when_its_turn_comes,
        given=(LONG, "trainer.total_training_steps=4"),
    ),
    prompts_case("pass_rate", "[2,4]", "rows", num_rows(12, 3), ("data.pass_rate_key=number",)),
    prompts_case(
        "pass_rate_key",
        "other_number",
        "rows",
        num_rows(3, 6),
        ("data.pass_rate=[2,4]", "data.pass_rate_key=number"),
    ),
    Case(
        "data.skip_outside",
        "data.skip_outside=[0.2,1.0]",
        "rows that come again",
        passes_over,
        given=LONGER,
    ),
    prompts_case("train_max_samples", "5", "rows", num_rows(12, 5)),
    prompts_case("val_max_samples", "3", "rows", num_rows(6, 3, of=1), (VALIDATED,)),
    Case(
        "data.allow_overlap",
        "data.allow_overlap=true",
        "a warning",
        overlaps,
        given=(VALIDATED,),
        look=the_spec,
    ),
    Case("data.shuffle", "data.shuffle=false", "the order of rows", in_file_order),
    Case("data.seed", "data.seed=7", "the order of rows", in_another_order),
    Case(
        "data.num_loader_workers",
        "data.num_loader_workers=0",
        "threads that tokenise; the same tokens",
        same_rows_by_other_threads,
        given=("data.train_files={lab}/many.jsonl", "data.num_loader_workers=2"),
        look=threads_and_rows,
    ),
)
