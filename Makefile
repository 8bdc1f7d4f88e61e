# `make demo` and `make test` need Python >= 3.11 and make; they set up .venv on their own.
# PIP_ARGS is handed to pip, for example
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# takes torch's smaller CPU build where PyPI would give the CUDA build.

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: demo test clean

demo: .venv/installed
	$(BIN)/feddpms compare --methods local,fedavg,fedprox,moon,fedmix,feddpms --rounds 20

test: .venv/developing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/developing: .venv/installed
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
