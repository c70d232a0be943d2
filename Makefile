# `make demo` and `make test` set up all they need (a .venv with pinned versions), then run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format clean

demo: $(STAMP)
	$(BIN)/tlora demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -m "not slow and not real_data"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[data,bench,test,dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
