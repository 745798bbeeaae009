"""What only a run can prove, because it depends on the machine, the model, the user's code and
luck.

`invariants.py` has the checks of every step. Some steps are checked whole (`schedule.py` says
which): `checker.py` records such a step and runs the checks that `all_checks.py` lists. No check
has a formula of its own: formulas are proven by the tests."""
