"""Reads scripts, commands and configs of other systems, and converts them, for
`distflow migrate`."""
