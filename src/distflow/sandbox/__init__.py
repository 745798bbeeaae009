"""Running programs that nobody trusts: in a process of their own, behind walls that the kernel holds.

`inside` is all that the processes behind the walls load; the rest runs in the process that asks.
"""
