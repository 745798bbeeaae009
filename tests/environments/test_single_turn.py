"""A prompt that is answered once: one episode a sample."""

import asyncio
from collections.abc import Sequence

from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.data.sample import Segment
from distflow.environments.single_turn import single_turn
from distflow.environments.workflow import Turn
from distflow.flow.ticket import Ticket


def test_each_sample_is_an_episode_of_the_group() -> None:
    async def answer(prompt_ids: Sequence[int]) -> list[Turn]:
        ids = [(*prompt_ids, number) for number in range(3)]
        return [Turn(Segment("policy", i, (-1.0,) * 3, (-1.0,) * 3, (0,) * 3), f"{i}", "stop") for i in ids]

    row = PromptRow(0, (5, 6), "?", ground_truth="!", domain="math")
    batch = Batch.from_samples(asyncio.run(single_turn(answer, row, Ticket(7, 0, 0, 3, 0))))
    assert batch["uid"] == ["7-0", "7-1", "7-2"]
    assert batch["group_index"].tolist() == [7, 7, 7] and batch["episode_index"].tolist() == [0, 1, 2]
    assert batch["agent"] == ["policy"] * 3 and batch["domain"] == ["math"] * 3
    assert batch["response_ids"].tolist() == [[5, 6, 0], [5, 6, 1], [5, 6, 2]]
