"""Steps whose tokens the next one needs on the host: schedule, run, sample."""

import itertools

import torch
from torch import Tensor

from distflow.models.decoder import DecoderView, PromptKV
from distflow.rollout.embedded.lane import Drawn, Lane
from distflow.rollout.embedded.sampler import sample
from distflow.rollout.embedded.scheduler import Prefill, Work
from distflow.rollout.embedded.tiles import Tiles


def step_here(lane: Lane, decoder: DecoderView, tiles: Tiles | None, weights: object) -> Drawn:
    """The lane's next step. weights: names those that the decoder holds."""
    work = lane.scheduler.schedule()
    if tiles is not None:
        draws = tiles.draw(lane, work, weights)
    else:
        hidden = _prefill(lane, decoder, work, weights) if work.prefills else _decode(lane, decoder, work)
        draws = sample(decoder.logits(hidden), work.sequences)
    return Drawn(work.sequences, *(column.tolist() for column in draws))


def _prefill(lane: Lane, decoder: DecoderView, work: Work, weights: object) -> Tensor:
    """Returns `(rows, hidden)` of the last prompt tokens, in the order of the slots."""
    slot, hidden = work.first_slot, []
    num_tokens_at_most = max(len(each.prompt_ids) + each.params.max_tokens for each in work.sequences)
    for prefill in work.prefills:
        for forward, rows in _rows_of(lane, decoder, prefill, weights):
            lane.slots.fill(forward, rows, slot, lane.scheduler.num_wanted, num_tokens_at_most)
            hidden.append(forward.hidden[torch.tensor(rows, device=forward.hidden.device)])
            slot += len(rows)
    return torch.cat(hidden)


def _rows_of(lane: Lane, decoder: DecoderView, prefill: Prefill, weights: object) -> list[tuple[PromptKV, list[int]]]:
    """Forwards with the rows to copy from each, a row for each sequence, in order."""
    places = lane.prompts.rows(weights, prefill.contexts, decoder.prefill)
    places = [place for place, starts in zip(places, prefill.starts, strict=True) for _ in starts]
    runs = itertools.groupby(places, key=lambda place: id(place[0]))
    return [(run[0][0], [row for _, row in run]) for run in (list(group) for _, group in runs)]


def _decode(lane: Lane, decoder: DecoderView, work: Work) -> Tensor:
    positions = [sequence.position for sequence in work.sequences]
    tokens = torch.tensor([sequence.token_ids[-1] for sequence in work.sequences], device=decoder.device)
    keys, values = lane.slots.window(len(positions), max(positions) + 1, lane.scheduler.num_wanted)
    return decoder.decode(tokens, torch.tensor(positions, device=decoder.device), keys, values)
