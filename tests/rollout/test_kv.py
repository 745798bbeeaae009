"""Key-value slots keep what was written through growth and moves; the prompt cache is bounded and versioned."""

import torch

from distflow.models.decoder import PromptKV
from distflow.rollout.embedded.kv import KVSlots, PromptCache


def prompt_kv(contexts: list[tuple[int, ...]]) -> PromptKV:
    """Keys and values that tell which token of which prompt they are of."""
    longest = max(map(len, contexts))
    ids = torch.tensor([[*context, *[-1] * (longest - len(context))] for context in contexts], dtype=torch.float32)
    keys = ids[None, :, None, None, :].expand(2, -1, 3, 4, -1).clone()
    return PromptKV(keys, keys.transpose(-1, -2).clone() + 0.5, ids[:, :1].clone())


def held(slots: KVSlots, slot: int, length: int) -> list[float]:
    keys, values = slots.window(slot + 1, length)
    assert torch.equal(values[:, slot], keys[:, slot].transpose(-1, -2) + 0.5)
    assert (keys[:, slot] == keys[0, slot, 0, 0]).all()
    return keys[0, slot, 0, 0].tolist()


def test_fill_grow_and_move() -> None:
    slots = KVSlots()
    slots.fill(prompt_kv([(1, 2, 3), (4, 5)]), [0, 0, 1], first_slot=0)
    slots.fill(prompt_kv([(6,) * 150, (7,)]), [1, 0], first_slot=3)
    assert held(slots, 1, 3) == [1, 2, 3]
    assert held(slots, 2, 2) == [4, 5]
    assert held(slots, 4, 150) == [6] * 150
    slots.move([(4, 0), (3, 1)])
    assert held(slots, 0, 150) == [6] * 150
    assert held(slots, 1, 1) == [7]
    assert held(slots, 2, 2) == [4, 5]


def test_new_memory_is_zero_and_reset_returns_it() -> None:
    slots = KVSlots()
    slots.fill(prompt_kv([(1, 2)]), [0], first_slot=0)
    keys, values = slots.window(3, 200)
    assert not keys[:, 1:].any() and not keys[..., 2:].any() and not values[:, 1:].any()
    slots.reset()
    assert slots.keys.numel() == slots.values.numel() == 0


def test_cached_prompts_are_found_until_they_are_pushed_out() -> None:
    cache, prefilled = PromptCache(max_tokens=10), []

    def prefill(contexts: list[tuple[int, ...]]) -> PromptKV:
        prefilled.append(contexts)
        return prompt_kv(contexts)

    def first_tokens(contexts: list[tuple[int, ...]], version: int = 0) -> list[float]:
        return [kv.keys[0, row, 0, 0, 0].item() for kv, row in cache.rows(version, contexts, prefill)]

    assert first_tokens([(1, 1), (2, 2)]) == [1, 2]
    assert first_tokens([(2, 2), (3, 3), (1, 1)]) == [2, 3, 1]
    assert prefilled == [[(1, 1), (2, 2)], [(3, 3)]]
    assert first_tokens([(3, 3)], version=1) == [3]  # other weights: not the same keys
    assert prefilled[-1] == [(3, 3)] and len(prefilled) == 3
    assert first_tokens([(4,) * 6]) == [4]  # 4 + 2 + 2 + 6 tokens: the first forward goes
    assert first_tokens([(3, 3), (1, 1)]) == [3, 1]
    assert prefilled[3:] == [[(4,) * 6], [(1, 1)]]
    assert first_tokens([(5,) * 11]) == [5] and first_tokens([(5,) * 11]) == [5]  # too long to keep
    assert prefilled[-2:] == [[(5,) * 11]] * 2
    cache.clear()
    assert len(cache) == 0
