# `make demo` and `make test` set up everything they need in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

# torch first and pinned: anything looser brings several GB of CUDA packages.
$(VENV)/installed: pyproject.toml setup.py $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0 "setuptools>=77" wheel ninja numpy
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[test,demo]" "triton==3.7.*"
	touch $@

demo: $(VENV)/installed
	$(BIN)/fastkd demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info
