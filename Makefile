# `make quickstart` and `make test` are all that a newcomer needs; each first makes what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
QUICKSTART := runs/quickstart

.PHONY: install quickstart test test-slow test-faults docs clean

install: $(INSTALLED)

# torch comes first and by its own range, so that no other package chooses a newer one.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "distflow needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# A small decoder learns sums from examples, and then better by reinforcement: about three minutes on two cores.
quickstart: $(INSTALLED)
	rm -rf $(QUICKSTART)
	$(BIN)/distflow sft quickstart_sft
	$(BIN)/distflow export $(QUICKSTART)/sft --to $(QUICKSTART)/model
	$(BIN)/distflow train quickstart_grpo

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and not alone" -n auto --dist worksteal
	$(BIN)/python -m pytest -m "slow and alone"

# Those of the slow tests that strike real processes.
test-faults: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and faults"

# The reference page of the configuration, from its schema.
docs: $(INSTALLED)
	$(BIN)/python -m distflow.config.reference

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
