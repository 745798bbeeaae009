"""The auditor: recomputes a step from recorded data, by plain code that shares nothing with the code it checks.

`schedule.py` decides which steps are audited; `auditor.py` runs the checks; `recorder.py` records; `recorded_data.py`
holds what was recorded, sample by sample. Most other files hold one or two checks, each with what it needs, its limit
and its message; `all_checks.py` lists them.
"""
