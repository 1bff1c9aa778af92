# make demo | test | lint: each builds .venv on a fresh clone; nothing but python3 (3.10 or newer) is needed.
#   TORCH=torch==2.11.0           another torch than the default
#   TORCH=                        the torch of PYTHON's own site-packages, left as it is (a GPU machine that has one)
#   PYTHON=python3.12             the interpreter that .venv is made from
#   USE=$(which python)           no .venv at all: an environment where `pip install -e '.[test]'` was run (`.[demo]` for demo)
TORCH ?= torch==2.13.0
PYTHON ?= python3
PYTEST_ARGS ?= -q -n 2 -m "not gpu"

# Files that say what .venv holds: torch alone, and the package with one of its extras.
ifdef USE
RUN := $(USE)
else
RUN := .venv/bin/python
BASE := .venv/base-$(or $(TORCH),of-$(notdir $(PYTHON)))
DEMO := $(BASE)-demo
TEST := $(BASE)-test
endif

.PHONY: demo test gpu-test lint wheel clean

demo: $(DEMO)
	$(RUN) examples/demo.py

test: $(TEST)
	$(RUN) -m pytest $(PYTEST_ARGS)

gpu-test: $(TEST)
	$(RUN) -m pytest -q -m gpu

# mypy can't follow an editable install into codegen/, so it reads the tree as it is once installed.
lint: $(TEST)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	rm -rf build/installed && mkdir -p build/installed
	cp -R sta_compile build/installed/sta_compile
	cp -R codegen cutlass_templates build/installed/sta_compile
	cd build/installed && $(if $(findstring /,$(RUN)),$(abspath $(RUN)),$(RUN)) -m mypy --config-file ../../pyproject.toml -p sta_compile

wheel: $(BASE)
	$(RUN) -m pip wheel --no-deps --wheel-dir dist .

ifndef USE
$(BASE):
	rm -rf .venv
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) .venv
	$(if $(TORCH),$(RUN) -m pip install --quiet $(TORCH))
	touch $@

$(DEMO) $(TEST): $(BASE)-%: $(BASE) pyproject.toml setup.py
	$(RUN) -m pip install --quiet -e ".[$*]"
	touch $@
endif

clean:
	rm -rf .venv build dist sta_compile.egg-info
