"""A solver and a checker, each with a policy of its own: the solver learns to name the larger
digit, and the checker to tell whether it did (`distflow train examples/solver_checker.yaml`)."""

from distflow import workflow


def digits():
    """The rows of the data: two digits, and the larger one."""
    return [
        {"prompt": f"{a}{b}", "answer": str(max(a, b))} for a, b in ((1, 2), (4, 3), (2, 3), (1, 4))
    ]


@workflow
async def solve(agents, row):
    reply = await agents["solver"].ask(row.prompt, max_tokens=1)
    right = reply.text == row.ground_truth
    judged = await agents["checker"].ask(f"{row.prompt}={reply.text}", max_tokens=1)
    return {
        "solver": float(right),
        "checker": float(judged.text == ("1" if right else "0")),
        "acc": float(right),
    }
