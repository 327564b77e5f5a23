# Every command of development. `make help` lists them.
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TE_PYTHON := $(VENV)/transformer-engine
TESTS_INSTALLED := $(TE_PYTHON)/.installed
GPU_VENV := .venv-gpu
GPU_INSTALLED := $(GPU_VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed

# Some machines forbid it: then each of a thousand commands would compile the floors again, and each worker the tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help install install-gpu quickstart quick test test-all style lint bench bench-trl same-bits chaos fuzz mutants gpu-check gpu-bench gpu-bundle golden docs pictures lock clean

help:  ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED) $(TESTS_INSTALLED)  ## build .venv with every pinned dependency; PYTHON=python3.13 works too

install-gpu: $(GPU_INSTALLED)  ## the same for GPUs with CUDA 13, in .venv-gpu (10 GB); PYTHON=python3.13 works too

# $(call bootstrap,DIRECTORY) makes a virtual environment of bootstrap.txt, and $(call packages,DIRECTORY,FILE)
# fills it. The files are complete and hashed, so nothing is resolved here, and packages without a wheel are
# built by the setuptools of bootstrap.txt. uv is fast; pip is the fallback where a registry is configured
# for pip alone.
HASHED := --quiet --require-hashes --no-deps
BUILT_HERE := $(HASHED) --no-build-isolation
# uv counts a package as installed of which it linked no more than the metadata before it was killed: an
# environment whose installation was cut off is cleared.
CUT_OFF = $(1)/.installing
define bootstrap
	@if [ -e $(CUT_OFF) ]; then echo "the last installation into $(1) was cut off; clearing it"; fi
	@$(PYTHON) -m venv $$([ ! -e $(CUT_OFF) ] || echo --clear) $(1)
	@touch $(CUT_OFF)
	@$(1)/bin/pip install $(HASHED) --disable-pip-version-check -r requirements/bootstrap.txt
endef
define packages
	@$(1)/bin/uv pip install $(BUILT_HERE) --compile-bytecode --python $(1)/bin/python -r $(2) \
	  || { echo "uv cannot install $(2), as it says above; trying pip" >&2; \
	       $(1)/bin/pip install $(BUILT_HERE) -r $(2); }
endef
define braid
	@$(1)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
endef

# $(call complete,DIRECTORY) is the last step.
define complete
	@rm $(CUT_OFF)
	@touch $@
endef

# $(call check_python,DIRECTORY) exits before anything is downloaded. `venv` would leave the interpreter that
# a directory has, and the packages of two Pythons in it.
VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
define check_python
	@python='$(PYTHON)'; version=$$($$python $(VERSION) 2> /dev/null || echo missing); case $$version in 3.12|3.13) ;; \
	  *) echo "make: Braid needs Python 3.12 or 3.13, and $$python is $$version; install one and name it:" \
	          "make $(or $(MAKECMDGOALS),install) PYTHON=python3.13" >&2; exit 1;; esac; \
	 old=$$($(1)/bin/python $(VERSION) 2> /dev/null); [ ! -L $(1)/bin/python ] || [ "$$old" = $$version ] \
	  || { echo "make: $(1) has Python $${old:-that is gone}, and $$python is $$version;" \
	            "remove it first: rm -rf $(1)" >&2; exit 1; }
endef

# $(call torch,DIRECTORY): pip alone finds the CPU build, since uv reads none of pip's configuration. Where
# pip has none, the package index's build runs on CPUs too, with the libraries that it is linked with.
define torch
	@if $(1)/bin/pip install $(HASHED) -r requirements/torch-cpu.txt 2> $(1)/no-cpu-torch.txt; \
	  then echo "torch: the CPU build that pip finds"; \
	  else echo "torch: pip finds no CPU build ($(1)/no-cpu-torch.txt says why); taking the CUDA build, 3 GB larger, see README.md"; \
	       $(1)/bin/uv pip install $(HASHED) --compile-bytecode --python $(1)/bin/python -r requirements/torch-cuda.txt \
	       || { echo "uv cannot install requirements/torch-cuda.txt, as it says above; trying pip" >&2; \
	            $(1)/bin/pip install $(HASHED) -r requirements/torch-cuda.txt; }; fi
endef

# The charts of `braid report` are JavaScript, and tests read published tokenizers; all else works
# without them.
define vendor
	@$(1)/bin/python -m tools.vendor \
	  || echo "braid report, or tests of the browser and of real tokenizers, will not work: no npm registry, as it says above; later: $(1)/bin/python -m tools.vendor" >&2
endef

TORCH := requirements/torch-cpu.txt requirements/torch-cuda.txt

$(INSTALLED): requirements/bootstrap.txt $(TORCH) requirements/cpu.txt setup.py tools/vendor.py
	$(call check_python,$(VENV))
	@echo "installing into $(VENV): downloads 1 to 3 GB, which takes some minutes"
	$(call bootstrap,$(VENV))
	$(call torch,$(VENV))
	$(call packages,$(VENV),requirements/cpu.txt)
	$(call braid,$(VENV))
	$(call vendor,$(VENV))
	$(call complete,$(VENV))

# Beside the environment's packages, not among them: see tests/te_python.py.
$(TESTS_INSTALLED): $(INSTALLED) requirements/te-python.txt
	@rm -rf $(TE_PYTHON)
	@$(BIN)/uv pip install $(HASHED) --python $(BIN)/python --target $(TE_PYTHON) -r requirements/te-python.txt \
	  || { echo "uv cannot install requirements/te-python.txt, as it says above; trying pip" >&2; \
	       $(BIN)/pip install $(HASHED) --target $(TE_PYTHON) -r requirements/te-python.txt; }
	@touch $@

# TransformerEngine's extension is compiled last, against the torch that is installed by then and with the
# headers and the nvcc (asked only for its version) of NVIDIA's wheels, so that no CUDA toolkit is needed.
# It would otherwise download an unhashed build. Ninja, of the environment, compiles several files at once.
# TransformerEngine's libraries are linked with NCCL, which only torch finds: torch is imported before them.
define transformer_engine
	@nvidia=$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia")') \
	  && echo "compiling TransformerEngine's extension for this torch, 2 to 12 minutes" \
	  && export CUDA_HOME=$$nvidia/cu13 CPLUS_INCLUDE_PATH=$$nvidia/cudnn/include:$$nvidia/nccl/include \
	            NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE PATH="$$PWD/$(1)/bin:$$PATH" \
	  && { $(1)/bin/uv pip install $(BUILT_HERE) --python $(1)/bin/python -r $(2) \
	       || { echo "uv cannot install $(2), as it says above; trying pip" >&2; \
	            $(1)/bin/pip install $(BUILT_HERE) -r $(2); }; }
	@$(1)/bin/python -c 'import torch, transformer_engine.pytorch'
endef

$(GPU_INSTALLED): requirements/bootstrap.txt requirements/gpu.txt requirements/gpu-built.txt setup.py
	$(call check_python,$(GPU_VENV))
	@$(PYTHON) requirements/gpu_machine.py
	@echo "installing into $(GPU_VENV): downloads about 5 GB, which takes some minutes"
	$(call bootstrap,$(GPU_VENV))
	$(call packages,$(GPU_VENV),requirements/gpu.txt)
	$(call braid,$(GPU_VENV))
	$(call transformer_engine,$(GPU_VENV),requirements/gpu-built.txt)
	$(call vendor,$(GPU_VENV))
	$(call complete,$(GPU_VENV))

quickstart: $(INSTALLED)  ## cold start, three experts, merge, evaluation and export, on this machine
	$(BIN)/braid run configs/quickstart.yaml

# Three workers on two cores, since a third of what tests wait for is not the cores. A file stays on one
# (tests/conftest.py); files start in the order of their directories, the longest first.
PYTEST := $(BIN)/python -m pytest -n 3 --no-loadscope-reorder

pictures: $(TESTS_INSTALLED)  ## the pictures of docs/how-to/read-a-run.md, drawn again by its tests
	$(BIN)/python -m pytest tests/browser/test_pictures.py
	for kept in docs/images/*; do cp build/screenshots/docs/$$(basename $$kept) $$kept; done

quick: $(TESTS_INSTALLED)  ## unit and pipeline tests, without ranks or engines (4 minutes)
	$(PYTEST) tests/pipeline tests/stages tests/parallel tests/browser tests/repository

test: $(TESTS_INSTALLED) style  ## style, types, and a test of every property (9 to 16 minutes, up to 60 on slow cores)
	$(PYTEST) tests

test-all: $(TESTS_INSTALLED) style  ## all of it: further layouts, families, seeds, kills, and Slurm
	$(PYTEST) -m 'not exhaustive' tests --ignore=tests/slurm
	$(BIN)/python -m pytest -m 'not exhaustive' tests/slurm  # alone: one host holds one Slurm

bench: $(INSTALLED)  ## speed and memory of the parts, into benchmarks/results.json (some minutes)
	$(BIN)/python benchmarks/all.py

bench-trl: $(TRL_INSTALLED)  ## GRPO steps a minute of TRL's trainer, in a separate environment
	$(TRL_VENV)/bin/python -W ignore benchmarks/trl_steps.py --size a --steps 20
	$(TRL_VENV)/bin/python -W ignore benchmarks/trl_steps.py --size b --steps 3

$(TRL_INSTALLED): requirements/bootstrap.txt $(TORCH) benchmarks/trl-requirements.txt setup.py
	$(call check_python,$(TRL_VENV))
	@echo "installing into $(TRL_VENV), which takes some minutes"
	$(call bootstrap,$(TRL_VENV))
	$(call torch,$(TRL_VENV))
	$(call packages,$(TRL_VENV),benchmarks/trl-requirements.txt)
	$(call braid,$(TRL_VENV))
	$(call complete,$(TRL_VENV))

same-bits: $(INSTALLED)  ## a small deterministic run, killed three times and resumed: the same bits? (2 minutes)
	$(BIN)/python -W ignore benchmarks/chaos.py --cases 3 --kills 3 --results build/same-bits.json

chaos: $(INSTALLED)  ## kill -9 at 50 random moments of a deterministic run: the same bits each time? (30 minutes at most)
	$(BIN)/python -W ignore benchmarks/chaos.py

fuzz: $(INSTALLED)  ## 10,000 damaged configurations, 2,000 damaged run directories, 500 with samples (20 minutes); SEED=N for others
	$(BIN)/python -m tests.fuzz --configs 10000 --runs 2000 --reports 500 --seed $(or $(SEED),0)

mutants: $(INSTALLED)  ## mistakes made on purpose in a clone: do the tests catch them? (an hour); ONLY=TEXT for some
	$(BIN)/python -m tests.mutants --jobs 2 $(if $(ONLY),--only "$(ONLY)") $(if $(RESULT),--result $(RESULT))

# With the environment of `make install-gpu` where it is, else with the machine's own Python and torch and
# the packages of `make gpu-bundle`, if they are for that Python; GPU_PYTHON=python3.12 names another.
# What is missing is skipped, and named.
GPU_BUNDLE := build/gpu-bundle
GPU_BIN := $(if $(wildcard $(GPU_INSTALLED)),$(GPU_VENV)/bin)
GPU_PYTHON := $(if $(GPU_BIN),$(GPU_BIN)/python,python3)
GPU_PACKAGES := $(if $(GPU_BIN),,--bundle $(GPU_BUNDLE))

gpu-check:  ## on a CUDA device: parity with a CPU, losses, refit by IPC, same bits (5 minutes); all tests of one rank
	$(GPU_PYTHON) -m tests.gpu check $(GPU_PACKAGES)
	$(if $(GPU_BIN),$(GPU_PYTHON) -m pytest -m one_device,@echo "tests of one rank: skipped: they need make install-gpu")

gpu-bench:  ## on a CUDA device: tokens/s and MFU of layers of Qwen3-30B-A3B, memory, losses (4 minutes)
	$(GPU_PYTHON) -m tests.gpu bench $(GPU_PACKAGES)

gpu-bundle: $(INSTALLED)  ## pack megatron-core and the like for a machine with a GPU and Python 3.12 and no registry (26 MiB)
	$(BIN)/python -m tests.gpu.bundle $(GPU_BUNDLE)

golden: $(INSTALLED)  ## rewrite the messages and pipelines of tests/pipeline/golden*; then read their diff
	$(BIN)/python -m tests.pipeline.test_golden_messages
	$(BIN)/python -m tests.pipeline.test_shipped_pipelines

# Where the clone came from, as a browser opens it; the site links there.
ORIGIN = $(shell git remote get-url origin 2> /dev/null | sed 's,^git@\([^:]*\):,https://\1/,; s,\.git$$,,')

docs: $(INSTALLED)  ## write docs/reference from the declarations, and build the site into site/
	$(BIN)/python -m tools.docs
	NO_MKDOCS_2_WARNING=1 REPOSITORY_URL=$(ORIGIN) $(BIN)/mkdocs build --strict --quiet

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style  ## style and types
	$(BIN)/mypy

lock: $(INSTALLED)  ## resolve setup.py's ranges into requirements/, hash the pins, propose newer; UPGRADE=1: all newest
	$(BIN)/python requirements/resolve.py $(if $(UPGRADE),--upgrade)
	$(BIN)/python requirements/lock.py
	$(BIN)/python -W ignore -m tools.reasoning_gym_datasets
	$(BIN)/python requirements/propose.py
	$(BIN)/python -m tests.engine.vllm_wheels

clean:  ## remove .venv, .venv-gpu, .venv-trl and caches; runs/ stays
	rm -rf $(VENV) $(GPU_VENV) $(TRL_VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
