"""Tokens that sequences begin with alike: told by brute force, computed once, values and gradients
unchanged."""

import pytest
import torch

from distflow.models.packed_attention import PACKED_ATTENTION, spread_rows
from distflow.models.packed_forward import packed_hidden_states
from distflow.models.packed_layout import Packing, shared_prefixes
from tests.models.test_packed import make_model

GROUPS = (
    ([5, 6, 7, 8], [5, 6, 7, 9, 4], [5, 6], [5, 6, 7]),  # of the one before: 3, 2, 2 tokens
    ([5, 9], [8]),
    ([8, 8, 8, 8, 8, 8], [8, 8, 8, 8, 8, 8]),  # the whole of it
    ([3, 5, 6, 7, 8], [3, 5, 7, 7, 8, 9, 9, 9, 9, 9]),  # alike again behind a difference
)
SEQUENCES = [sequence for group in GROUPS for sequence in group]
KEPT = 4 + 2 + 0 + 1 + 1 + 1 + 5 + 0 + 5 + 8


def packed(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([t for each in sequences for t in each]), torch.tensor(
        [len(each) for each in sequences]
    )


def test_each_token_is_found_at_one_with_the_same_past():
    ids, lengths = packed(SEQUENCES)
    sharing = shared_prefixes(ids, lengths)
    assert sharing is not None
    pasts = [tuple(each[: i + 1]) for each in SEQUENCES for i in range(len(each))]
    assert [pasts[int(sharing.positions[place])] for place in sharing.place] == pasts
    assert sharing.place[sharing.positions].tolist() == list(range(len(sharing.positions)))
    assert sharing.positions.tolist() == sorted(sharing.positions.tolist())
    assert len(sharing.positions) == KEPT


@pytest.mark.parametrize("sequences", [[], [[4, 5]], [[4, 5], [5, 5], [4, 5]]])
def test_nothing_in_common_is_none(sequences):
    assert shared_prefixes(*packed(sequences)) is None


@pytest.mark.parametrize("implementation", [PACKED_ATTENTION, "sdpa"])
def test_states_and_gradients_are_those_of_a_loop(implementation):
    model = make_model("qwen3")
    ids, lengths = packed(SEQUENCES)
    wanted = torch.tensor([0, 2, 3, 6, 12, 13, 14, 20, 25, 31])
    weights = torch.randn(
        len(ids), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    alone = [model.model(part[None]).last_hidden_state[0] for part in ids.split(lengths.tolist())]
    expected = torch.cat(alone)[wanted]
    (expected * weights[wanted]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    model.set_attn_implementation(implementation)
    tokens = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, inputs, __: tokens.append(inputs[0].shape[1])
    )
    sharing = shared_prefixes(ids, lengths)
    found = packed_hidden_states(model, ids, lengths, wanted=wanted, sharing=sharing)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    (found * weights[wanted]).sum().backward()
    assert tokens == [len(sharing.positions) if implementation == PACKED_ATTENTION else len(ids)]

    for name, gradient in gradients.items():
        # A norm's gradient is float32 whatever the model: what is added up before it rounds
        # otherwise than behind it.
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, rtol=0, atol=2e-5, msg=name
        )


def test_rows_spread_to_sequences_and_their_gradients_add_up():
    ids, lengths = packed(SEQUENCES)
    sharing = shared_prefixes(ids, lengths)
    spread = Packing(lengths, torch.device("cpu"), sharing).spread
    kept = ids[sharing.positions].double()[:, None].requires_grad_()
    weights = torch.randn(len(ids), 1, dtype=torch.float64)
    (spread_rows(kept, spread) * weights).sum().backward()
    assert torch.equal(spread_rows(kept, spread)[:, 0], ids.double())
    expected = torch.zeros_like(kept).index_add_(0, sharing.place, weights)
    torch.testing.assert_close(kept.grad, expected)
