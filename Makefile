# Everything runs in $(VENV), which `make setup` makes with $(PYTHON) and brings up to date when the two files that say
# what belongs in it change.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The versions of Python that pyproject.toml promises.
PYTHONS := 3.11 3.12 3.13
# Other versions than those of constraints.txt: the lower bounds of pyproject.toml, and the newest. Each torch brings the
# Triton of its release. Requirements of one environment are joined by commas, torch first.
VERSIONS := torch==2.11.*,triton==3.6.*,numba==0.63.*,llvmlite==0.46.* torch==2.15.*
# The tests that need each private name of these libraries (src/fusednorm/private), and what is built on them.
CORE := $(addprefix tests/test_,$(addsuffix .py,private_names ops autograd checkpoint interop nn errors compile compiled \
  export inductor neighbours volumes rewriting transforms dtensor cpu_compiler cpu_threads cpu_outputs triton_launch \
  triton_driver triton_plans triton_interpreter triton_moments hopper))

# pip reads the first for what it installs and, before pip 25.3, for its build environments too; since then the second.
# Without them a dependency could bring another torch, which is gigabytes on Linux.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup run test test-pythons test-versions test-exhaustive mutants lint types format docs dist clean

help:
	@echo 'make setup   install fusednorm and all it can use into .venv'
	@echo 'make run     the quick benchmark, then a U-Net that restores a photograph'
	@echo 'make test    the test suite'
	@echo 'make test-pythons   the test suite under each of Python $(PYTHONS) that is installed'
	@echo 'make test-versions   the tests of private names and what uses them, with the oldest and the newest torch'
	@echo 'make test-exhaustive   every kernel configuration compiled for every GPU, 20 minutes'
	@echo 'make mutants MODULE=norm   which changes of a module the tests do not notice'
	@echo 'make lint    ruff: rules and format'
	@echo 'make types   mypy'
	@echo 'make format  let ruff mend what it can'
	@echo 'make docs    the documentation as a site in build/docs'
	@echo 'make dist    sdist and wheel in dist/, and what an installed wheel has to do, in an environment of its own'
	@echo 'make clean   remove .venv and what tools left behind'

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: setup
	$(BIN)/fusednorm bench --suite quick
	$(BIN)/python examples/photo_unet.py

# A crash ends the run: xdist 3.8 can wait for ever for a worker that took a crashed one's place.
# Tests that measure time come second, on a machine that is theirs, and again where a neighbour spoiled an attempt.
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'not timing and not exhaustive'
	$(BIN)/python -m pytest -m timing --reruns 2

# Each version in an environment of its own, .venv-3.12 for one. A version that is not installed is named at the end, and fails nothing; a version that fails fails the whole.
test-pythons:
	@missing=; failed=; \
	for version in $(PYTHONS); do \
	  if python$$version -c '' 2>/dev/null; then \
	    echo "== Python $$version"; \
	    $(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version || failed="$$failed $$version"; \
	  else missing="$$missing $$version"; fi; \
	done; \
	test -z "$$missing" || echo "== not installed, not tested: Python$$missing"; \
	test -z "$$failed" || { echo "== failed: Python$$failed"; exit 1; }

# Each in an environment of its own, .venv-torch2.11-python3 for one, at constraints.txt's versions of all else. The
# wheels of torch other than constraints.txt's may carry CUDA: six gigabytes for each environment, and no GPU is needed.
test-versions:
	@failed=; \
	for versions in $(VERSIONS); do \
	  first=$${versions%%,*}; \
	  venv=.venv-$$(echo "$$first" | sed 's/==//; s/\.\*$$//')-$(notdir $(PYTHON)); \
	  echo "== $$versions, $(PYTHON)"; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv && \
	  sed -E '/^(torch|triton|numba|llvmlite|numpy|setuptools)[=<>]/d' constraints.txt > $$venv/constraints.txt && \
	  PIP_CONSTRAINT=$$venv/constraints.txt PIP_BUILD_CONSTRAINT=$$venv/constraints.txt \
	    $$venv/bin/python -m pip install --quiet --editable '.[test,triton]' $$(echo "$$versions" | tr , ' ') && \
	  $$venv/bin/python -m pytest -m 'not timing and not exhaustive' $(CORE) || failed="$$failed $$versions"; \
	done; \
	test -z "$$failed" || { echo "== failed:$$failed"; exit 1; }

test-exhaustive: setup
	$(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0 -m exhaustive

# What is changed, and the tests that should notice, stand in pyproject.toml; a run goes on where the last one stopped.
# One thread each: what torch starts for more does not survive the fork for a mutant.
MODULE ?=
mutants: setup
	$(BIN)/python -m pip install --quiet --editable '.[mutants]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(WORKERS) 'fusednorm.$(if $(MODULE),$(MODULE).)*'
	$(BIN)/mutmut results

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

# The wheel is built from the sdist, so that the sdist is known to be whole. Python ignores the folder that it is called
# in and PYTHONPATH (-I), and tests/installed.py sees that the package comes from the environment.
DIST := .venv-dist
dist: setup
	rm -rf dist $(DIST)
	$(BIN)/python -m hatchling build -t sdist -d dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/fusednorm-*.tar.gz
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet dist/fusednorm-*.whl
	$(DIST)/bin/python -I tests/installed.py
	ls -l dist

clean:
	rm -rf .venv .venv-* mutants .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
