# Everything a person types. `make help` lists it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed

.PHONY: help install quickstart quick test test-all lint bench bench-trl chaos gpu-check golden lock clean

help:  ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## build .venv with every pinned dependency

# requirements/cpu.txt is complete, so nothing is resolved here. torch comes first and through pip,
# whose own configuration may be where its CPU build stands; uv is fast, and pip stands in for it
# where a registry is configured for pip alone.
$(INSTALLED): requirements/cpu.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 uv==0.13.9
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r requirements/cpu.txt \
	  || $(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: $(INSTALLED)  ## cold start, three experts, merge, evaluation and export, on this machine
	$(BIN)/braid run configs/quickstart.yaml

# Two workers, since half of what a test waits for is not the cores. tests/conftest.py says which
# tests share one: those of one group run in the order of the directories, the longest first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

quick: $(INSTALLED)  ## unit and pipeline tests, without ranks or engines (3 minutes)
	$(PYTEST) tests/unit tests/pipeline

test: $(INSTALLED) lint  ## lint, types, and a test of every property (12 minutes)
	$(PYTEST)

test-all: $(INSTALLED) lint  ## all of it: further layouts, families, seeds, kills, and Slurm
	$(PYTEST) -m 'not exhaustive'

bench: $(INSTALLED)  ## speed and memory of the parts, into benchmarks/results.json (some minutes)
	$(BIN)/python benchmarks/all.py

bench-trl: $(TRL_INSTALLED)  ## GRPO steps a minute of TRL's trainer, in an environment of its own
	$(TRL_VENV)/bin/python -W ignore benchmarks/trl_steps.py --size a --steps 20
	$(TRL_VENV)/bin/python -W ignore benchmarks/trl_steps.py --size b --steps 3

$(TRL_INSTALLED): benchmarks/trl-requirements.txt setup.py
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 uv==0.13.9
	$(TRL_VENV)/bin/uv pip install --quiet --python $(TRL_VENV)/bin/python --no-deps -r benchmarks/trl-requirements.txt \
	  || $(TRL_VENV)/bin/pip install --quiet --no-deps -r benchmarks/trl-requirements.txt
	$(TRL_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

chaos: $(INSTALLED)  ## kill -9 at 50 random moments of a deterministic run: the same bits each time? (30 minutes at most)
	$(BIN)/python -W ignore benchmarks/chaos.py

gpu-check: $(INSTALLED)  ## on a CUDA device: the tests that need one rank, on that device
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('no CUDA device here: nothing was checked')"
	$(BIN)/python -m pytest -m one_device

golden: $(INSTALLED)  ## write the messages of tests/pipeline/golden anew; then read their diff
	$(BIN)/python tests/pipeline/test_golden_messages.py

lint: $(INSTALLED)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(INSTALLED)  ## resolve setup.py's ranges anew into requirements/cpu.txt
	$(BIN)/uv pip install --quiet --upgrade --python $(BIN)/python \
	  --override requirements/overrides.txt --editable '.[cpu,dev]'
	$(BIN)/pip freeze --exclude-editable --exclude torch --exclude uv --exclude braid > requirements/cpu.txt

clean:  ## remove .venv, .venv-trl and caches; runs/ stays
	rm -rf $(VENV) $(TRL_VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
