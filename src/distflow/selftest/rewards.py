"""The reward of the selftest. Alone in its file, so that the processes that judge load nothing else."""


def graded(solution_str: str) -> float:
    """Deaf to meaning: what matters is that the answers of a group differ."""
    return sum(map(ord, solution_str)) % 7 / 6
