# `make demo` and `make test` need nothing but Python 3.11 or newer; the first one to run makes .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0 # only when the environment has no torch yet
ARGS ?=

BIN := .venv/bin
READY := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# one process; the recipe owns precision, and every core computes (accelerate's own default is one thread)
CORES := $(shell getconf _NPROCESSORS_ONLN)
LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
          --num_cpu_threads_per_process $(CORES)

.PHONY: demo test lint install clean

demo: $(READY)
	$(LAUNCH) qat/train.py recipe=demo.yaml $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Tare needs Python 3.11 or newer; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(strip $(TORCH))"
	$(PIP) install --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
