"""Child processes that end with everything they started, and the end of a process whose user's code
started some."""
