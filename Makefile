# make demo | test | lint: each builds .venv on a fresh clone; nothing but python3 (3.10 or newer) is needed.
#   TORCH=torch==2.11.0    another torch than the default
#   TORCH=                 the torch of PYTHON, left as it is: for a GPU machine that has one
#   PYTHON=python3.12      the interpreter that .venv is made from
TORCH ?= torch==2.13.0
PYTHON ?= python3
PIP_INDEX ?= $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu)
PYTEST_ARGS ?= -q -m "not gpu"

VENV := .venv
BIN := $(VENV)/bin
# Remade when the torch that was asked for, or the list of dependencies, changes.
READY := $(VENV)/ready-$(if $(TORCH),$(subst /,_,$(firstword $(TORCH))),system)

.PHONY: demo test lint gpu-test wheel clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

gpu-test: $(READY)
	$(BIN)/python -m pytest -q -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy_installed

wheel: $(READY)
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

$(READY): pyproject.toml setup.py
	rm -rf $(VENV)
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	$(if $(TORCH),$(BIN)/pip install --quiet $(PIP_INDEX) $(TORCH))
	$(BIN)/pip install --quiet -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
