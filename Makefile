# Everything runs in .venv, which `make setup` makes with $(PYTHON) and brings up to date when the two files that say
# what belongs in it change.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed

# pip reads the first for what it installs and, before pip 25.3, for its build environments too; since then the second.
# Without them a dependency could bring another torch, which is gigabytes on Linux.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup run test test-exhaustive lint types format clean

help:
	@echo 'make setup   install fusednorm and all it can use into .venv'
	@echo 'make run     the quick benchmark, then a small network on real data'
	@echo 'make test    the test suite'
	@echo 'make test-exhaustive   every kernel configuration compiled for every GPU, 10 minutes'
	@echo 'make lint    ruff: rules and format'
	@echo 'make types   mypy'
	@echo 'make format  let ruff mend what it can'
	@echo 'make clean   remove .venv and what tools left behind'

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: setup
	$(BIN)/fusednorm bench --suite quick
	$(BIN)/python examples/train_digits.py

# Tests that measure time come second, on a machine that is theirs, and again where a neighbour spoiled an attempt.
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not timing and not exhaustive'
	$(BIN)/python -m pytest -m timing --reruns 2

test-exhaustive: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m exhaustive

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
