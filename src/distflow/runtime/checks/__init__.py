"""Claims about a run that are checked while it runs: each file one claim."""


class TrustError(RuntimeError):
    """A claim about the run does not hold, so its results would be worthless. Names the evidence and likely causes."""
