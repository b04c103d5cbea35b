# `make demo` and `make test` set up .venv themselves; they need Python 3.11+ with venv and pip, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo demo-short ladder test lint format clean

demo: $(VENV)/installed ## the short ladder: one run of each rung of the study, and the tables
	$(BIN)/python examples/ladder.py --short

demo-short: $(VENV)/installed ## three rungs, a few steps: only to see that it works
	$(BIN)/python examples/ladder.py --short --rungs single,ddp,ddpopt measure.steps=10

ladder: $(VENV)/installed ## the whole ladder on what this machine has, for claims: 5 interleaved repeats
	$(BIN)/python examples/ladder.py

test: $(VENV)/installed ## all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) outputs multirun
