"""Draws: groups are counted for the steps that their class covers."""

from distflow.scheduling.admission import GenerationBudget


def draws_from(next_step):
    """Steps of 3 places, each of which may have 2 groups."""
    return GenerationBudget(2, next_step, lambda step: 3 * (step + 1 - next_step))


def issue(draws, due, num_tickets):
    for _ in range(num_tickets):
        draws.issue(due)


def test_without_staleness_each_step_has_its_own_tickets():
    draws = draws_from(next_step=3)
    issue(draws, 3, 4)
    assert (draws.room(3), draws.room(4)) == (2, 6), (
        "what a step did not need is not the next one's"
    )


def test_the_first_class_covers_all_steps_up_to_its_own_also_after_a_resume():
    assert draws_from(next_step=0).room(2) == 18
    assert draws_from(next_step=7).room(9) == 18


def test_a_version_without_tickets_leaves_its_steps_to_the_next():
    draws = draws_from(next_step=0)
    issue(draws, 1, 12)
    assert (draws.room(1), draws.room(2), draws.room(3)) == (0, 6, 12)
    issue(draws, 3, 5)
    assert (draws.room(3), draws.room(4)) == (7, 6)
