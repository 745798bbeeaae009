"""The auditor: recomputes a step from recorded data with plain code that shares nothing with the
code that it checks. `auditor.py` runs the checks that `all_checks.py` lists, each declared by
`@check`."""
