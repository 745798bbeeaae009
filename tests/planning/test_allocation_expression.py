"""The allocation expression: what it means, and what is wrong with it."""

import re

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
        ("sglang.d4p1m1+d2p1m2", 8, [[("sglang", "rollout", 4)], [("fsdp", "actor", 4)]]),
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
    assert sizes("d4p1m1") == Sizes(data=4) and sizes("t2d3c1p1e1") == Sizes(data=3, tensor=2)
    assert sizes("t2d3").num_devices == 6
    found = parse_allocation("fsdp:e4d2t2").parts[0].sizes
    assert found == Sizes(data=2, tensor=2, expert=4) and found.num_devices == 4
    assert str(found) == "d2t2e4"
    rows = parse_allocation("fsdp:c2t2").parts[0].sizes
    assert rows == Sizes(context=2, tensor=2) and rows.num_devices == 4
    assert str(rows) == "d1c2t2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'': write ENGINE:SIZES"),
        ("vlm:d2+fsdp:d4", "engine 'vlm'; did you mean 'vllm'?"),
        ("sglang:d2+fdsp:d4", "did you mean 'fsdp'?"),
        ("d4p1m1", "e.g. fsdp:d4p1m1"),
        ("d2+embedded:d2", "e.g. fsdp:d2"),
        ("embedded.d2+d2+d2", "a second part is the actor"),
        ("fsdp:d2t", "'fsdp:d2t': write ENGINE:SIZES"),
        ("fsdp:d2d2", "'d2': write each of d, t"),
        ("fsdp:t2m2", "'m2': write each of d, t"),
        ("fsdp:d0", "'d0': write each of d, t"),
        ("fsdp:x2", "'x2': write each of d, t"),
        ("embedded:d2++fsdp:d2", "'': write ENGINE:SIZES"),
        ("fsdp[rollout]:d2", "for 'rollout' choose"),
        ("vllm[critic]:d2", "for 'critic' choose"),
        ("fsdp:d2p2", "'fsdp' has no pipeline parallelism"),
        ("embedded:d2+torch:d2m2", "'torch' has no tensor parallelism"),
        ("megatron:d4e3", "'megatron' has no expert parallelism"),
        ("embedded:d4|fsdp:d2t2e3", "divide the 4 ranks; the nearest sizes are d2t2e"),
        ("fsdp:d4t2e1|torch[ref]:d4e2", "'torch' has no expert parallelism"),
        ("torch:d2c2", "'torch' has no context parallelism"),
        ("embedded:c2|fsdp:c2", "'embedded' has no context parallelism"),
        ("vllm:d2p2+torch:d2", "'vllm' has no pipeline parallelism"),
        ("fsdp:d2|fsdp[critic]:d4", "same devices as 'fsdp:d2'"),
        ("fsdp:d2+fsdp:d4", "a second part is the actor; name its role"),
        ("fsdp:d2+torch[critic]:d2", "engine of the actor, 'fsdp'"),
    ],
)
def test_the_part_that_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        parse_allocation(text)


def test_an_engine_that_is_not_there_yet_is_refused_by_its_name() -> None:
    require_engines(parse_allocation("embedded:d2+torch:d2"))
    with pytest.raises(UserError, match="'megatron' .* torch, fsdp"):
        require_engines(parse_allocation("embedded:d4+megatron:d2"))
    require_engines(parse_allocation("vllm:d2t2+torch:d2"))


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
    assert [part.text for part in found.parts] == parts


ALPHABET = [*ROLLOUT_ENGINES, *TRAIN_ENGINES, "actor", "d2", "t2", "d", "3", *"[]:+| é\n"]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(ALPHABET), max_size=9).map("".join))
def test_whatever_is_written_is_read_or_refused_in_words(text: str) -> None:
    try:
        assert isinstance(parse_allocation(text), Allocation)
    except UserError as error:
        assert str(error).startswith("trainer.allocation: ")
