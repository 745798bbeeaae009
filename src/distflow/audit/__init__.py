"""The auditor: recomputes a step from recorded data, by plain code that shares nothing with the code it checks.

`audited_steps.py` decides which steps are audited; `auditor.py` runs the checks; `recorded_calls.py` records;
`check_base.py` holds the recorded data, sample by sample; `model_forward.py` runs models. Most other files hold the
checks of one subject, declared by `@check`; `all_checks.py` lists them.
"""
