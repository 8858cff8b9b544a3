# make quickstart    install, train on the built-in glyphs, evaluate, write a report
# make test          install, run the tests
# make check         what CI runs: lint, types, docs, test
# make docs          build the documentation site: build/docs/index.html
# make test-gpu      the tests that need a CUDA device
# make dist          build the sdist and the wheel into dist/
#
# VENV=folder uses another environment, RUN=folder another run, PYTEST_ARGS=... reaches pytest.
# Packages come by uv, which does not read pip's settings; INSTALL='.venv/bin/pip install' uses pip.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# Several times as fast as pip.
INSTALL ?= $(BIN)/python -m uv pip install --quiet --python $(BIN)/python

.PHONY: help quickstart test test-gpu lint types format docs check dist

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -9

# A second call continues a run that was interrupted, and only evaluates one that is complete.
quickstart: $(VENV)/.installed-train
	$(BIN)/megabatch train --config quickstart --output $(RUN) --resume
	@echo
	@echo "Look at $(RUN)/report.html. To train once more: rm -r $(RUN), or make quickstart RUN=runs/other"

# Many small tests: one thread each and about a process for each core (tests/conftest.py) is
# twice as fast as the default.
# Each process takes one file after another, the longest first (tests/conftest.py).
# Without bytecode, which some machines do not write, each of some 50 interpreters compiles anew.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device")'
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Warnings are errors: broken links between pages, pages in no table of contents.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env \
		--conf-dir docs --doctree-dir build/doctrees . build/docs
	@echo "Look at build/docs/index.html."

check: lint types docs test

# From the files as they are; build/ of an earlier one would put deleted modules into the wheel.
dist: $(BIN)/uv
	rm -rf build dist
	$(INSTALL) build
	$(BIN)/python -m build

# Installed again whenever pyproject.toml changes.
$(VENV)/.installed-train: pyproject.toml | $(BIN)/uv
	@echo "installing megabatch[train] into $(VENV) (half a minute to a few minutes)"
	@$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/uv
	@echo "installing megabatch[train,dev,fp8] into $(VENV) (half a minute to a few minutes)"
	@$(INSTALL) -e '.[train,dev,fp8]'
	@touch $@ $(VENV)/.installed-train

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/uv
	@echo "installing megabatch[train,dev,fp8,docs] into $(VENV) (half a minute to a few minutes)"
	@$(INSTALL) -e '.[train,dev,fp8,docs]'
	@touch $@ $(VENV)/.installed-train $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
