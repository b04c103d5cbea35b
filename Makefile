# `make demo` and `make test` set up .venv themselves; they need Python 3.11+ with venv and pip, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo demo-short test lint format clean

demo: $(VENV)/installed ## train one ViT under stock DDP and under ours, and show one table
	$(BIN)/python examples/demo.py

demo-short: $(VENV)/installed
	$(BIN)/python examples/demo.py --short

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
