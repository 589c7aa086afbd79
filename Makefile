# `make compare` and `make test` do all the set-up themselves, once. Overrides: PYTHON=python3.12 VENV=path JOBS=8 ARGS="..."
PYTHON ?= python3
VENV ?= .venv
JOBS ?= auto
ARGS ?=

BIN := $(VENV)/bin
RUN := $(VENV)/.flashzoo-run
DEV := $(VENV)/.flashzoo-dev
PINS := constraints.txt constraints-torch.txt

.DEFAULT_GOAL := help
.PHONY: help compare test fuzz mutants seen host newcomer docs wheel lint format bench report clean

help: ## say what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

compare: $(RUN) ## run every version side by side, on the GPU if there is one
	@$(BIN)/flashzoo compare $(ARGS)

test: lint ## lint, then the tests
	$(BIN)/python -m pytest -n $(JOBS) --benchmark-disable $(ARGS)

fuzz: $(DEV) ## random calls of every version, on the GPU if there is one, for a minute or ARGS="--seconds 280"
	$(BIN)/python -m tests.fuzz $(ARGS)

# Once more what failed: a machine that others load is at times not even fair to a ratio.
HOST := $(BIN)/python -m pytest tests/test_host_cost.py --benchmark-only --benchmark-columns=min,median,iqr
host: $(DEV) ## what a call costs the host, held to tests/host_baseline.json
	$(HOST) $(ARGS) || $(HOST) --last-failed $(ARGS)

newcomer: $(DEV) ## a fresh clone and the wheel in fresh environments, and every command and program of README and docs
	$(BIN)/python tests/newcomer.py

docs: $(DEV) ## the documentation site, in build/docs; a warning or a dead link is an error
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees -c docs . build/docs $(ARGS)

wheel: $(DEV) ## sdist and wheel of this checkout in dist/, checked as a registry checks them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

mutants: $(DEV) ## put faults into the code, one at a time: does the suite see them?
	$(BIN)/python tests/mutants.py $(ARGS)

seen: $(DEV) ## the whole suite on this machine's GPU, and what was seen of it in tests/<gpu>_seen.json
	$(BIN)/python tests/seen.py $(ARGS)

lint: $(DEV) ## ruff and pyright, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV) ## ruff's formatter and its safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) ## time versions and peers on this GPU, into bench/results
	$(BIN)/flashzoo bench $(ARGS)

report: $(DEV) ## measure what READMEs and docs show, if there is a GPU; draw it, here and in report.html
	$(BIN)/python -m bench.everything $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .benchmarks build *.egg-info

# A torch that PYTHON or VENV already has (a GPU machine's own) is kept; only where there is none does a pin choose it.
HAS_TORCH := -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)'

$(BIN)/python:
	@$(PYTHON) -m venv $$($(PYTHON) $(HAS_TORCH) && echo --system-site-packages) $(VENV)

# CuTe DSL is half a gigabyte: it comes where v3 can run, on Hopper, and with the tests, which compile v3 anywhere.
IF_HOPPER := nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -q '^9\.0' && echo v3,

define install
	@echo "installing flashzoo into $(VENV): some minutes, once"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --retries 10 -e ".[$(1)]" \
		-c constraints.txt $$($(BIN)/python $(HAS_TORCH) || echo -c constraints-torch.txt)
endef

$(RUN): pyproject.toml $(PINS) | $(BIN)/python
	$(call install,$$($(IF_HOPPER))cli)
	@touch $@

$(DEV): pyproject.toml $(PINS) | $(BIN)/python
	$(call install,dev)
	@touch $(RUN) $@
