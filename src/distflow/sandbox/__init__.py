"""Runs untrusted programs, each in its own process, isolated by the kernel.

`inside` is loaded by the isolated processes; the other modules run in the caller's process.
"""
