"""Key-value slots keep what was written through growth and moves; the prompt cache is bounded and
versioned."""

import pytest
import torch

from distflow.models.cached_decoder import PromptKV
from distflow.rollout.embedded.kv_slots import KVSlots
from distflow.rollout.embedded.prompt_cache import PromptCache


def prompt_kv(contexts: list[tuple[int, ...]]) -> PromptKV:
    """Keys and values that tell which token of which prompt they are of."""
    longest = max(map(len, contexts))
    ids = torch.tensor(
        [[*context, *[-1] * (longest - len(context))] for context in contexts], dtype=torch.float32
    )
    keys = ids[None, :, None, :, None].expand(2, -1, 3, -1, 4).clone()
    return PromptKV(keys, keys + 0.5, ids[:, :1].clone())


def held(slots: KVSlots, slot: int, length: int) -> list[float]:
    keys, values = (memory[:, slot, :, :length] for memory in (slots.keys, slots.values))
    assert torch.equal(values, keys + 0.5)
    assert (keys == keys[0, 0, :, :1]).all()
    return keys[0, 0, :, 0].tolist()


def test_memory_follows_the_sequences_that_are_left():
    slots = KVSlots()
    slots.fill(
        prompt_kv([(index,) * 20 for index in range(8)]),
        list(range(8)),
        first_slot=0,
        num_wanted=100,
    )
    assert slots.keys.shape[1] == 100, "room for all that wait"
    keys, _ = slots.window(2, 400, num_wanted=2)
    assert keys.shape[3] >= 400 and slots.keys.shape[1] == 2, "grows for those alone that are left"
    assert held(slots, 1, 20) == [1] * 20
    keys, _ = slots.window(2, 350, num_wanted=2)
    assert keys.shape[3] >= 400, "a little too much stays"
    keys, _ = slots.window(2, 100, num_wanted=2)
    assert 100 <= keys.shape[3] < 200, "much too much goes"
    assert held(slots, 1, 20) == [1] * 20 and not keys[:, 1, :, 20:].any()
    slots.fill(prompt_kv([(9,)]), [0], first_slot=2, num_wanted=3)
    assert slots.keys.shape[3] == keys.shape[3], "short prompts cut nobody off"


@pytest.mark.parametrize(("most", "room"), [(0, 32), (80, 96), (5000, 128)])
def test_those_who_may_need_it_have_room_from_the_start(most, room):
    slots = KVSlots()
    slots.fill(prompt_kv([(1, 2)]), [0], first_slot=0, num_wanted=3, num_tokens_at_most=most)
    slots.fill(prompt_kv([(3,)]), [0], first_slot=1, num_wanted=3, num_tokens_at_most=min(most, 20))
    keys, _ = slots.window(2, 3, num_wanted=3)
    assert keys.shape[3] == room, "and it is kept for those who came first"
    assert held(slots, 0, 2) == [1, 2]


def test_cached_prompts_are_found_until_they_are_pushed_out():
    cache = PromptCache(max_tokens=10)
    prefilled = []

    def prefill(contexts: list[tuple[int, ...]]) -> PromptKV:
        prefilled.append(contexts)
        return prompt_kv(contexts)

    def first_tokens(contexts: list[tuple[int, ...]], version: int = 0) -> list[float]:
        return [
            kv.keys[0, row, 0, 0, 0].item() for kv, row in cache.rows(version, contexts, prefill)
        ]

    assert first_tokens([(1, 1), (2, 2)]) == [1, 2]
    assert first_tokens([(2, 2), (3, 3), (1, 1)]) == [2, 3, 1]
    assert prefilled == [[(1, 1), (2, 2)], [(3, 3)]]
    assert first_tokens([(3, 3)], version=1) == [3]  # other weights: not the same keys
    assert prefilled[-1] == [(3, 3)] and len(prefilled) == 3
    assert first_tokens([(4,) * 6]) == [4]  # 4 + 2 + 2 + 6 tokens: all before it go
    assert first_tokens([(4,) * 6, (1, 1)]) == [4, 1]
    assert prefilled[3:] == [[(4,) * 6], [(1, 1)]]
    assert first_tokens([(5,) * 11]) == [5] and first_tokens([(5,) * 11]) == [5]  # too long to keep
    assert prefilled[-2:] == [[(5,) * 11]] * 2
    assert first_tokens([(1, 1)]) == [1]  # went with the others
    cache.clear()
    assert first_tokens([(1, 1)]) == [1] and prefilled[-2:] == [[(1, 1)]] * 2
