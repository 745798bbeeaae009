"""Runs untrusted programs, each in a process of its own that the kernel isolates.

`inside` is loaded by the isolated processes; the other modules run in the caller's process.
"""
