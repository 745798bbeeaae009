"""Whole runs with tools: what a tool said is shown and not trained on, token by token as the engine saw it."""
