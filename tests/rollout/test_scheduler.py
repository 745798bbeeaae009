"""The scheduler: order, sharing, budgets, and slots that stay dense whatever happens."""

from distflow.rollout.embedded.scheduler import DrawnToken, Scheduler, Sequence, sequences_of
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream


def sequences(prompt: tuple[int, ...], count: int, number: int = 0) -> list[Sequence]:
    params = SamplingParams(max_tokens=100)
    return sequences_of(
        number, GenerateRequest(prompt, tuple(range(count)), params, Stream(0, "t", 0, 0))
    )


def test_samples_of_a_prompt_share_one_prefill() -> None:
    """Its tokens count once against those of a step."""
    scheduler = Scheduler(max_num_seqs=16, max_prefill_tokens=5)
    scheduler.add(sequences((1, 2, 3), 4))
    scheduler.add(sequences((4, 5), 2, number=1))
    scheduler.add(sequences((6,), 1, number=2))
    work = scheduler.schedule()
    assert [list(prefill) for prefill in work.prefills] == [[(1, 2, 3), (4, 5)]]
    assert [len(starts) for starts in work.prefills[0].values()] == [4, 2]
    assert work.sequences == scheduler.running and len(scheduler.running) == 6


def test_slots_limit_admission_and_order_is_kept() -> None:
    scheduler = Scheduler(max_num_seqs=3, max_prefill_tokens=100)
    group = sequences((1, 2), 5)
    scheduler.add(group)
    assert scheduler.schedule().sequences == group[:3]
    for sequence in group[:3]:
        sequence.append(DrawnToken(7, 0.0, 0.0, [], []), 0)
    assert scheduler.schedule().prefills == []
    assert scheduler.remove([group[1]]) == [(2, 1)]
    work = scheduler.schedule()
    assert work.first_slot == 2 and work.sequences == [group[3]]


def test_prompts_of_one_forward_are_at_most_half_padding() -> None:
    scheduler = Scheduler(max_num_seqs=64, max_prefill_tokens=10_000)
    for number, length in enumerate((3, 100, 51, 49, 24, 7, 200)):
        scheduler.add(sequences(tuple(range(length)), 1, number))
    work = scheduler.schedule()
    lengths = [[len(context) for context in prefill] for prefill in work.prefills]
    assert lengths == [[200, 100], [51, 49], [24], [7], [3]]
    assert [len(sequence.prompt_ids) for sequence in work.sequences] == [200, 100, 51, 49, 24, 7, 3]


def test_preempted_sequences_come_first_with_their_tokens() -> None:
    scheduler = Scheduler(max_num_seqs=2, max_prefill_tokens=100)
    group = sequences((1, 2), 3)
    scheduler.add(group)
    scheduler.schedule()
    group[0].append(DrawnToken(8, 0.0, 0.0, [], []), 0)
    group[1].append(DrawnToken(9, 0.0, 0.0, [], []), 0)
    scheduler.preempt()
    work = scheduler.schedule()
    assert work.sequences == group[:2]
    assert list(work.prefills[0]) == [(1, 2, 8), (1, 2, 9)]
