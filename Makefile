# `make` prints this help.  Continuous integration calls these targets and nothing else.
.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
# The trainer's torch.  Empty: the version and hashes of requirements/torch.txt.  Otherwise another build, such as
# torch==2.13.0+cu126 or a file.  On x86-64 Linux the default index serves a CUDA build of several GB; see docs/testing.md.
TORCH ?=
VENV := .venv
# Tests start Python hundreds of times; without bytecode files each start compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
COMPILE := uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --no-annotate --quiet --custom-compile-command "make lock"
# The number of test workers: one more than a small machine has cores, because many tests wait for processes.
JOBS ?= 3
# RL-Kernel: the stack that pins it, and sources to use instead of a download.
RLK_STACK ?= rl-kernel-host
RLK_SRC ?=
# The stack whose package locks `make lock` rewrites.
STACK ?=
# The hardware name for the demo; by default that of this machine.
HARDWARE ?= $$($(BIN)/python -c 'from rlk_repro.clusters.local import guess_hardware; \
  from rlk_repro.probes.node import probe_node; print(guess_hardware(probe_node("here")).hardware)')

.PHONY: help demo demo-rl-kernel test test-real lint fmt goldens evidence lock budget

help: ## Print this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.torch ## Install, run three short sessions, check and repeat them, print the answer
	@$(BIN)/python -m tools.demo

# RLK_SRC names the sources to install; the run then uses what is installed.
demo-rl-kernel: $(VENV)/.torch ## Install RL-Kernel at its pinned commit, then run the demo with it
	$(BIN)/python -m tools.rl_kernel --stack "$(RLK_STACK)" $(if $(RLK_SRC),--source "$(RLK_SRC)")
	hardware="$(HARDWARE)" && env -u RLK_SRC $(BIN)/rlk-repro submit --cluster local --run demo --wait \
	  --stack "$(RLK_STACK)" --hardware "$$hardware" --set switch=null --set rl_kernel.mode=require

test: $(VENV)/.dev $(VENV)/.torch ## Run the tests (a few minutes)
	sh tools/install-slurm.sh
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 30 --durations-min 3 -m "not gpu and not real"

# MARK="long and not gpu" runs what is left: many kills, all faults, all sabotaged images.  The same seed makes the same cases.
MARK ?= real and not long and not gpu
FUZZ_S ?= 60
FUZZ_SEED ?= 1
test-real: $(VENV)/.dev $(VENV)/.torch ## Run the heavier real parts (MARK), then fuzz readers for FUZZ_S seconds
	sh tools/install-slurm.sh --all
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope --durations 20 --durations-min 10 -m "$(MARK)"
	$(BIN)/python -m tests.security.fuzz --seconds "$(FUZZ_S)" --seed "$(FUZZ_SEED)" --keep build/fuzz

lint: $(VENV)/.dev $(VENV)/.torch ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fmt: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

goldens: $(VENV)/.dev $(VENV)/.torch ## Rewrite golden files: example jobs, schemas for editors, reports
	RLK_REPRO_GOLDENS=write $(BIN)/python -m pytest -q \
	  tests/clusters/test_golden_jobs.py tests/spec/test_specfile.py tests/report/test_goldens.py

evidence: $(VENV)/.base ## Verify and analyse again every bundle of docs/evidence
	$(BIN)/python -m tools.check_evidence

# A stack's file names the hashes of its package locks, which this prints.  glibc 2.34: Debian 12, Ubuntu 22.04, RHEL 9.
STACK_COMPILE = uv pip compile requirements/$(STACK).in --override requirements/$(STACK)-overrides.txt \
  --python-version 3.12 --only-binary :all: --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
  --quiet --custom-compile-command "make lock STACK=$(STACK)"
lock: ## Rewrite the hash locks, or with STACK=… the package locks of that stack (needs uv)
ifneq ($(STACK),)
	$(STACK_COMPILE) --python-platform x86_64-manylinux_2_34 -o requirements/$(STACK)-cuda-amd64.txt
	$(STACK_COMPILE) --python-platform aarch64-manylinux_2_34 -o requirements/$(STACK)-cuda-arm64.txt
	sha256sum requirements/$(STACK)-cuda-*.txt
else
	$(COMPILE) pyproject.toml -o requirements/base.txt
	$(COMPILE) -c requirements/base.txt --group build -o requirements/build.txt
	$(COMPILE) -c requirements/base.txt --group dev -o requirements/dev.txt
	$(COMPILE) --group rl-kernel -o requirements/rl-kernel.txt
endif

budget: ## Print the lines of source, tests, Markdown and data, and the number of files
	@git ls-files | $(PYTHON) tools/budget.py

$(VENV)/.venv:
	PYTHON=$(PYTHON) sh tools/make-venv.sh $(VENV)
	touch $@

$(VENV)/.base: $(VENV)/.venv requirements/base.txt requirements/build.txt pyproject.toml
	$(PIP) install --quiet --require-hashes -r requirements/base.txt -r requirements/build.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base requirements/dev.txt
	$(PIP) install --quiet --require-hashes -r requirements/dev.txt
	touch $@

# torch has its own lock: the right build depends on the machine, and torch's dependencies depend on the build.
$(VENV)/.torch: $(VENV)/.base requirements/torch.txt
	sh tools/install-torch.sh $(VENV) "$(TORCH)"
	touch $@
