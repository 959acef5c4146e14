# make train: train a language model on this machine's own Python sources.   make test: run the tests.
# make campaign: run the long cases that make test leaves out (SHARE=6: every sixth).
PYTHON ?= python3
TORCH ?= torch==2.13.0
CONFIG ?= configs/python-stdlib.toml
WORKERS ?= auto
SHARE ?= 1

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed

.PHONY: train test campaign lint format bench clean

train: $(RUN)
	$(VENV)/bin/phalanx train $(CONFIG) $(ARGS)

# Tests start Python some hundred times: none of these should compile our sources, not even where the environment keeps
# Python from writing down what it has compiled (pytest compiles test files itself). How many at a time, and the order of
# files: see tests/conftest.py.
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(DEV)
	$(VENV)/bin/python -m compileall -q -j 0 -x /test_ phalanx benchmarks tests
	$(PYTEST) -m "not campaign" $(ARGS)

campaign: $(DEV)
	$(PYTEST) -m campaign --campaign-share $(SHARE) $(ARGS)

lint: $(DEV)
	$(VENV)/bin/ruff check phalanx tests benchmarks
	$(VENV)/bin/ruff format --check phalanx tests benchmarks
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

format: $(DEV)
	$(VENV)/bin/ruff check --fix phalanx tests benchmarks
	$(VENV)/bin/ruff format phalanx tests benchmarks

bench: $(DEV)
	@for script in benchmarks/*.py; do echo "== $$script"; $(VENV)/bin/python $$script --quick || exit 1; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: left to another package's range, pip would take a build with gigabytes of CUDA libraries.
$(VENV)/.torch-installed: | $(VENV)/bin/python
	$(PIP) install --quiet $(TORCH)
	touch $@

$(RUN): pyproject.toml constraints.txt $(VENV)/.torch-installed
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

# HolisticTraceAnalysis asks for JupyterLab, and with its pandas beside pyarrow each start of that takes longer: what a
# test needs of both lies in a folder of its own.
$(DEV): pyproject.toml constraints.txt $(VENV)/.torch-installed
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	rm -rf $(VENV)/clients
	$(PIP) install --quiet --constraint constraints.txt --no-deps --target $(VENV)/clients HolisticTraceAnalysis pandas pydot
	touch $@ $(RUN)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
