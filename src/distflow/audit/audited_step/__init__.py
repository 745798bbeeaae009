"""The checks of an audited step against references: formulas, models, functions called again and
files read again."""
