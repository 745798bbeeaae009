"""The error of this room."""

from distflow.config.errors import UserError


class PipelineError(UserError):
    """A program is not well formed. The message names the node, the field or option, and the nearest existing name."""


class MissingColumn(PipelineError):
    """A node reads a column that nothing writes before it."""

    def __init__(self, message: str, column: str):
        super().__init__(message)
        self.column = column
