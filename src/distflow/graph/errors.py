"""The one error of this room."""


class PipelineError(ValueError):
    """A program is not well formed. The message names the node, the field or option, and the nearest existing name."""
