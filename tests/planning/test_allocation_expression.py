"""The allocation expression: what it means, and a caret under what is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.builtin_names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.errors import UserError
from distflow.planning.allocation_expression import Allocation, parse_allocation, require_engines
from distflow.planning.layouts import Sizes


def read(text: str) -> list[list[tuple[str, str, int]]]:
    """(engine, role, devices) of each part."""
    groups = parse_allocation(text).groups
    return [
        [(part.engine, part.role, part.sizes.num_devices) for part in group] for group in groups
    ]


@pytest.mark.parametrize(
    ("text", "num_devices", "parts"),
    [
        ("sglang:d2+fsdp:d4", 6, [[("sglang", "rollout", 2)], [("fsdp", "actor", 4)]]),
        (
            "sglang[rollout]:d2+fsdp[actor]:d4+fsdp[critic]:d2",
            8,
            [[("sglang", "rollout", 2)], [("fsdp", "actor", 4)], [("fsdp", "critic", 2)]],
        ),
        (
            "sglang[rollout]:d4+fsdp[actor]:d4|fsdp[critic]:d4",
            8,
            [[("sglang", "rollout", 4)], [("fsdp", "actor", 4), ("fsdp", "critic", 4)]],
        ),
        (
            "vllm[rollout]:d2t2+fsdp[actor]:d4",
            8,
            [[("vllm", "rollout", 4)], [("fsdp", "actor", 4)]],
        ),
        ("embedded:d4|megatron:d2m2", 4, [[("embedded", "rollout", 4), ("megatron", "actor", 4)]]),
        ("sglang.d4p1m1+d2p2m1", 8, [[("sglang", "rollout", 4)], [("megatron", "actor", 4)]]),
        ("sglang:d4p1t1+d4p1t1", 8, [[("sglang", "rollout", 4)], [("fsdp", "actor", 4)]]),
        ("embedded.d2+d2m2", 6, [[("embedded", "rollout", 2)], [("fsdp", "actor", 4)]]),
        (
            " embedded : d2\n + torch [ actor ] : d1 ",
            3,
            [[("embedded", "rollout", 2)], [("torch", "actor", 1)]],
        ),
    ],
)
def test_the_references(
    text: str, num_devices: int, parts: list[list[tuple[str, str, int]]]
) -> None:
    assert parse_allocation(text).num_devices == num_devices
    assert read(text) == parts


def sizes(text: str) -> Sizes:
    return parse_allocation(f"megatron:{text}").parts[0].sizes


def test_the_role_of_a_reward_model_has_two_names() -> None:
    found = [
        parse_allocation(f"embedded:d1+torch[{role}]:d1").parts[1].role
        for role in ("reward", "reward_model")
    ]
    assert found == ["reward_model", "reward_model"]


def test_sizes() -> None:
    assert sizes("d4p1m1") == Sizes(data=4) and sizes("d2p2m1") == Sizes(data=2, pipeline=2)
    assert sizes("t2d3c2p4e6") == Sizes(data=3, tensor=2, pipeline=4, context=2, expert=6)
    assert sizes("t2d3c2p4e6").num_devices == 48


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("", 0, "expected an engine here"),
        ("vlm:d2+fsdp:d4", 0, "there is no engine 'vlm'; did you mean 'vllm'?"),
        ("sglang:d2+fdsp:d4", 10, "did you mean 'fsdp'?"),
        ("d4p1m1", 0, "sizes without an engine; write e.g. fsdp:d4p1m1"),
        ("d2+embedded:d2", 0, "sizes without an engine; write e.g. fsdp:d2"),
        ("embedded.d2+d2+d2", 15, "a second part is the actor"),
        ("embedded[rollout].d2", 17, "expected ':' and the sizes of 'embedded' here"),
        ("fsdp d2", 5, "expected ':' and the sizes of 'fsdp' here"),
        ("fsdp", 4, "expected ':' and the sizes of 'fsdp' here"),
        ("fsdp:", 5, "expected sizes here"),
        ("fsdp:4", 5, "expected sizes here"),
        ("fsdp:d2t", 7, "expected a size here"),
        ("fsdp:d1234567", 12, "expected a size here"),
        ("fsdp:d2d2", 7, "the data size is given twice"),
        ("fsdp:t2m2", 7, "the tensor size is given twice"),
        ("fsdp:d0", 6, "the data size is at least 1"),
        ("fsdp:x2", 5, "there is no size 'x'"),
        ("fsdp:d2+", 8, "expected an engine here"),
        ("embedded:d2++fsdp:d2", 12, "expected an engine here"),
        ("fsdp:d2 ~ x", 8, "expected '+', '|' or the end of the expression here"),
        ("embedded:d2 fsdp:d2", 12, "expected '+', '|' or the end of the expression here"),
        ("fsdp[actor:d2", 10, "expected ']' here"),
        ("fsdp[]:d2", 5, "expected a role here"),
        ("fsdp[rollout]:d2", 5, "'fsdp' trains, and cannot generate"),
        ("vllm[critic]:d2", 5, "'vllm' generates, and cannot train"),
        ("fsdp:d2p2", 7, "the engine 'fsdp' has no pipeline parallelism; its sizes are d, t"),
        ("fsdp:d2c2", 7, "the engine 'fsdp' has no context parallelism; its sizes are d, t"),
        ("fsdp:d2e2", 7, "the engine 'fsdp' has no expert parallelism; its sizes are d, t"),
        (
            "embedded:d2+torch:d2m2",
            20,
            "the engine 'torch' has no tensor parallelism; its sizes are d",
        ),
        ("megatron:d4e3", 11, "experts shared by 3 ranks do not divide the 4 ranks"),
        (
            "fsdp:d2|fsdp[critic]:d4",
            8,
            "'actor' takes 2 devices and 'critic' 4, but '|' puts both on the same",
        ),
        ("fsdp:d2+fsdp:d4", 8, "a second part is the actor; name another role, e.g. fsdp[critic]"),
        ("hf:d2+embedded:d4", 6, "a second part is the rollout; leave one out"),
        (
            "fsdp:d2+torch[critic]:d2",
            8,
            "the critic has the engine of the actor, 'fsdp', not 'torch'",
        ),
    ],
)
def test_a_caret_is_under_what_is_wrong(text: str, at: int, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_allocation(text)
    message, shown, caret = str(caught.value).split("\n")
    assert message.startswith("trainer.allocation: ") and said in message
    assert shown == f"  {text}" and caret.index("^") - 2 == at


def test_an_engine_that_is_not_there_yet_is_refused_by_its_name() -> None:
    require_engines(parse_allocation("embedded:d2+torch:d2"))
    with pytest.raises(
        UserError, match="'megatron' is not implemented yet; choose from torch, fsdp\n"
    ) as caught:
        require_engines(parse_allocation("embedded:d4+megatron:d2"))
    assert str(caught.value).endswith("\n  " + " " * 12 + "^")
    require_engines(parse_allocation("vllm:d2t2+torch:d2"))
    with pytest.raises(
        UserError, match="a rollout engine with pipeline stages is not implemented yet"
    ):
        require_engines(parse_allocation("vllm:d2p2+torch:d2"))


PARTS = st.builds(
    lambda role, d, t: f"{'vllm' if role == 'rollout' else 'megatron'}[{role}]:d{d}t{t}",
    st.sampled_from(["rollout", "actor", "critic", "ref"]),
    st.integers(1, 9),
    st.integers(1, 9),
)


@settings(derandomize=True, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4, unique_by=lambda part: part.split("]")[0]))
def test_apart_devices_add_up(parts: list[str]) -> None:
    found = parse_allocation("+".join(parts))
    assert found.num_devices == sum(part.sizes.num_devices for part in found.parts)
    assert [found.text[part.at :].startswith(part.engine) for part in found.parts] == [True] * len(
        parts
    )


ALPHABET = [*ROLLOUT_ENGINES, *TRAIN_ENGINES, "actor", "d2", "t2", "d", "3", *"[]:+| é\n"]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(ALPHABET), max_size=9).map("".join))
def test_whatever_is_written_is_read_or_refused_in_words(text: str) -> None:
    try:
        assert isinstance(parse_allocation(text), Allocation)
    except UserError as error:
        message, shown, caret = str(error).split("\n")
        assert caret.index("^") <= len(shown), message
