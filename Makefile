# Two commands on a fresh machine, with Python >= 3.11 and make: `make demo` and `make test`.
# Everything is installed into .venv, once; a change of pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
# Minutes of training in `make demo`.
MINUTES ?= 5
# Test processes.
JOBS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test check check-long bench recipes docs setup clean

demo: $(READY)
	$(BIN)/manyheads train --preset demo --run-dir runs/demo --resume none --minutes $(MINUTES)
	$(BIN)/python -m manyheads.cli.demo runs/demo

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"
	MANYHEADS_TYPECHECK=0 $(BIN)/python -m pytest -m "unhooked and not slow"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-long: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) -m slow --figures reliability.json

bench: $(READY)
	@for script in $(wildcard benchmarks/*.py); do echo "$$script"; $(BIN)/python "$$script" || exit 1; done

# The commands of every recipe, on a little of the data; needs the folder of large fixtures (MANYHEADS_SHARED).
recipes: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) tests/integration/test_recipes.py

# The documentation as a site: site/index.html. Every link and name must hold.
docs: $(READY)
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(READY)

# torch goes first and alone, so that TORCH_INDEX serves nothing else; its pin gives way to TORCH_SPEC.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@echo "Setting up $(VENV), once: torch and what else is needed. This takes a minute or more."
	@$(PYTHON) -m venv $(VENV)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@echo '$(TORCH_SPEC)' >> $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c $(VENV)/constraints.txt) '$(TORCH_SPEC)'
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
