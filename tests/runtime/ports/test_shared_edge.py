"""The edge of several teams: what each rank takes of a step, and when a step is over."""

import threading

from distflow.flow.minibatch import minibatches
from distflow.runtime.ports.shared_edge import Facts, Portion, SharedEdge, Team
from distflow.runtime.waits import Waits
from tests.runtime.groups import coordinator

TOKENS = (40, 10, 30, 20, 25, 5)


def edge(*teams: Team) -> SharedEdge[str]:
    counted = coordinator(consumer_batch=len(TOKENS))
    made = SharedEdge[str](counted, Waits(), teams)
    for ticket in counted.take_tickets():
        made.put(ticket, f"group {ticket.number}", Facts(TOKENS[ticket.number], 0, None), [])
    return made


def taken(shared: SharedEdge[str], rank: int) -> list[int]:
    portion = shared.take(0, rank)
    assert isinstance(portion, Portion) and portion.tickets == tuple(range(len(TOKENS)))
    return [int(group.split()[1]) for group in portion.groups]


def test_ranks_that_compute_layers_together_take_the_same_share_and_release_together() -> None:
    shared = edge(Team((0, 0, 1, 1)))
    shares = [taken(shared, rank) for rank in range(4)]
    assert shares[0] == shares[1] and shares[2] == shares[3]
    assert sorted(shares[0] + shares[2]) == list(range(len(TOKENS)))
    released: list[int] = []
    threads = [
        threading.Thread(target=lambda rank=rank: released.append(shared.release(0, rank, True).version.step))
        for rank in range(4)
    ]
    for thread in threads[:3]:
        thread.start()
    threads[0].join(0.2)
    assert released == []
    threads[3].start()
    for thread in threads:
        thread.join(10)
    assert released == [1] * 4


def test_every_team_has_the_whole_step_and_divides_its_own_mini_batches() -> None:
    shared = edge(Team((0, 1), mini_batch=2, seed=7), Team((0,)))
    first, second, alone = (taken(shared, rank) for rank in range(3))
    assert sorted(first + second) == alone == list(range(len(TOKENS)))
    for mini_batch in minibatches(len(TOKENS), range(len(TOKENS)), 2, 7, 0, 0):
        assert [len(set(mini_batch) & set(share)) for share in (first, second)] == [1, 1]
