PYTHON ?= python3
BIN := .venv/bin
export GOMP_SPINCOUNT ?= 2000
export MALLOC_TRIM_THRESHOLD_ ?= 268435456
export MALLOC_MMAP_THRESHOLD_ ?= 33554432

.PHONY: install demo test lab lint

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev,engines,mlperf,parity,tensorboard]'
	touch $@

demo: install
	$(BIN)/sdlab-run papermill_runs/demo.yaml $(ARGS)

test: install
	$(BIN)/python -m pytest

lab: install
	$(BIN)/jupyter lab notebooks

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
