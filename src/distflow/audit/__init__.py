"""The auditor: proves a step again, from what was recorded first, by plain code that shares nothing with its path.

`auditor.py` and `schedule.py` say when; `recorder.py` records; `recorded_data.py` is what was recorded, sample by
sample. Each other file proves one thing about a step: what it needs, its limit and its message stand there, and
`all_checks.py` lists them.
"""
