"""The auditor: proves a step again, from what was recorded first, by plain code that shares nothing with its path.

`auditor.py` says when; `witness.py` and `watch.py` record; `evidence.py` is what they recorded, sample by sample. Each
other file that ends in a `CHECK` proves one claim: what it needs, its limit and its message stand there, and
`checks.py` lists them.
"""
