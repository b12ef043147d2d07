# Every target does its own set-up: from a fresh clone `make test` needs python3, pip, make and git.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_WORKERS ?= 2

# Services on one machine share the cores in time: threads that spin while they wait take them from the other service.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

.PHONY: venv
venv: $(STAMP) ## Make .venv and install outrider into it, with the tools of development.

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

.PHONY: model
model: $(STAMP) ## Fetch the default model into its cache, once.
	$(BIN)/python -m shared.default_model

.PHONY: check
check: $(STAMP) ## Lint, types, import contracts, protos: all that needs no test run.
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/gen_protos.py --check

.PHONY: test
test: model ## Run all tests, TEST_WORKERS at a time.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

.PHONY: test-fast
test-fast: $(STAMP) ## Run the tests that are quick and need no real model.
	$(BIN)/python -m pytest -m "not slow and not real_model and not real_pair"

.PHONY: mutants
mutants: $(STAMP) ## Break the code on purpose, one rule at a time, and see the named test fail.
	$(BIN)/python tools/mutants.py

.PHONY: demo
demo: model ## Start both services, generate once, show what speculation did, stop.
	$(BIN)/outrider demo

.PHONY: protos
protos: $(STAMP) ## Generate the stubs beside the protos anew.
	$(BIN)/python tools/gen_protos.py

.PHONY: format
format: $(STAMP) ## Sort imports and format the code.
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

.PHONY: clean
clean: ## Remove what the other targets made here; the model cache stays.
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
