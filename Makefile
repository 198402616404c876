# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
# `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
REQUIREMENTS := requirements.txt constraints.txt pyproject.toml
TPU_COMPILER := $(VENV)/tpu
PEER := $(VENV)/peer
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow kill-test benchmark peer ablation check clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/.installed ## Prepare data, train everything, evaluate; the report lands in runs/quickstart/
	$(BIN)/python -m experiments.quickstart --config=configs/quickstart.py --workdir=runs/quickstart $(ARGS)

test: $(VENV)/.installed-dev ## Run the tests (ARGS="tests/text -k bpe" for some of them)
	$(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(VENV)/.installed-dev $(TPU_COMPILER)/.tried ## Run the slow tests: kills, notebooks, TPU compiles
	PYTHONPATH="$(abspath $(TPU_COMPILER))$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -q -m slow \
	  -n $(WORKERS) --dist loadscope $(ARGS)

kill-test: $(VENV)/.installed-dev ## Kill a run 20 times; it must end as if nothing had happened
	$(BIN)/python -m experiments.kill_test --kills=20 $(ARGS)

benchmark: $(VENV)/.installed ## Measure speed (ARGS="--suite=moe_small --peer=transformers" beside the peer)
	$(BIN)/python -m experiments.benchmark $(ARGS)

ablation: $(VENV)/.installed ## Train and compare the arms of the elastic ablation (hours; an interrupted run goes on)
	$(BIN)/python -m experiments.ablation $(ARGS)

peer: $(PEER)/.installed ## Install what `benchmark` compares with, in an environment of its own

check: $(VENV)/.installed-dev ## Lint, check types and the import order of the floors
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean: ## Remove the environment, caches and build leftovers; runs/ stays
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is missing or older than 3.11; name another one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "error: python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }

$(VENV)/.installed: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) -e '.[quickstart]'
	@touch $@

$(VENV)/.installed-dev: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

# The TPU compiler needs no TPU. It lies outside site-packages, because JAX looks for a TPU wherever it finds libtpu.
$(TPU_COMPILER)/.tried: constraints.txt | $(VENV)/.installed-dev
	@mkdir -p $(TPU_COMPILER)
	$(PIP) --no-deps --upgrade --target $(TPU_COMPILER) libtpu \
	  || echo "libtpu cannot be had here: the TPU compile tests will be skipped"
	@touch $@

$(PEER)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy
	@touch $@
