"""A group goes to the worker that has the fewest, whatever came and went before."""

from random import Random

import pytest

from distflow.scheduling.groups_by_rollout_worker import GroupsByWorker


@pytest.mark.parametrize("seed", range(8))
def test_the_worker_with_the_fewest_groups_gets_the_next(seed):
    """Against a count by hand, over 4,000 moves with lost and new workers."""
    random = Random(seed)
    workers = GroupsByWorker([str(number) for number in range(5)], 0)

    held: dict[int, set[int]] = {number: set() for number in range(5)}  # those that take groups
    silent = list[int]()
    for group_id in range(4000):
        move = random.random()
        if move < 0.02 and len(held) > 1:
            lost = random.choice(sorted(held))
            assert set(workers.lose(lost)[1]) == held.pop(lost)
            silent.append(workers.join("new"))
        elif move < 0.06 and silent:
            held[silent[0]] = set()
            workers.ask(silent.pop(0), 0)
        elif move < 0.5 and any(held.values()):
            number = random.choice([number for number, own in held.items() if own])
            workers.end(ended := random.choice(sorted(held[number])), complete=True)
            held[number].remove(ended)
        else:
            fewest = min(held, key=lambda number: (len(held[number]), number))
            workers.assign(group_id, 0)
            assert group_id in workers.fetch(fewest)
            held[fewest].add(group_id)
