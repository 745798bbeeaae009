"""The error of a user's mistake: the message says what was wrong, where, and what to do; the exit status is 2."""


class UserError(ValueError):
    """A mistake in what the user gave (config, data, model folder, reward); never a fault of ours."""
