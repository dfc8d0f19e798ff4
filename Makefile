# make demo   sets up and runs the main job end to end
# make demo-faults   shows transient and persistent faults, and the verdict on each (about two minutes)
# make test   sets up and passes the tests (short ones; `make test-slow` runs the long ones, `make test-nightly` what takes hours)
# make docs   builds the documentation with the API reference in site/, in an environment of its own

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAINER := $(wildcard trainer/pyproject.toml)
DOCS_VENV := .venv-docs
# On top of $(VENV): torchtitan has many requirements, and few for what the tests use.
TITAN_VENV := .venv-titan
RAY_VENV := .venv-ray
TORCHFT_VENV := .venv-torchft
DOCS_READY := $(DOCS_VENV)/.ready
## One more than the two processors that continuous integration has: many tests wait, for deadlines
## and for each other.
PYTEST_WORKERS ?= 3
## Each worker gets an equal share of the short tests, in the order of files, and one that is through
## takes half of what another still has (`--dist worksteal`): a file's fixtures, and the servers of
## frameworks, are made once but in the few files that are parted, and all workers end together.
## Whole files (loadfile) do not: those with few tests, which are the longest, would come last.
## Long ones go one by one.
## Tests of other packages are all long (`tests/test_structure.py`), and slow to import.
export OMP_NUM_THREADS ?= 1
## Compiled modules are kept, so that neither the other worker, nor a writer, a command or the next
## run compiles Holdfast and rewrites the assertions of all tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-faults test compiled test-all test-slow test-nightly test-integrations lint types contracts format bench bench-groups trace docs setup clean help

help:
	@sed -n 's/^# //p' $(MAKEFILE_LIST); echo "also: setup lint format bench bench-groups trace test-slow clean"

setup: $(READY)

$(READY): pyproject.toml $(TRAINER) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Holdfast needs Python 3.11 or newer; say make PYTHON=python3.12 …"; exit 1; }
	@echo "Setting up $(VENV) (some minutes the first time) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' \
	  $(if $(TRAINER),--editable './trainer[all]')
	@touch $@

demo: setup
	@$(BIN)/python -m demo --out demo/out

demo-faults: setup
	@$(BIN)/python -m demo.faults --out demo/out

test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint compiled
	@$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal --ignore tests/packages -m "not slow and not nightly and not gpu"

## In a fresh clone each worker would rewrite the assertions of all tests, which is more than half of
## its start. Here one process does, while the types are checked on the other processor.
compiled: setup
	@ls tests/__pycache__/conftest.*-pytest-*.pyc >/dev/null 2>&1 \
	  || $(BIN)/pytest --collect-only --quiet --quiet --ignore tests/packages >/dev/null 2>&1 || true

test-slow: setup
	@$(BIN)/pytest -n $(PYTEST_WORKERS) -m "slow and not nightly and not gpu"

test-nightly: setup
	@$(BIN)/pytest -n $(PYTEST_WORKERS) -m "nightly and not gpu"

## All tests of the frameworks, the long ones too; those of a framework that is missing are skipped.
test-integrations: setup
	@$(BIN)/python -m pip install --quiet --no-deps lightning pytorch-lightning
	@test -x $(TITAN_VENV)/bin/python || $(PYTHON) -m venv $(TITAN_VENV)
	@readlink -f $(VENV)/lib/python*/site-packages > $$(echo $(TITAN_VENV)/lib/python*/site-packages)/base.pth
	@$(TITAN_VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt \
	  torchtitan spmd_types tyro docstring-parser typeguard torch_checkpointing
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@readlink -f $(VENV)/lib/python*/site-packages > $$(echo $(RAY_VENV)/lib/python*/site-packages)/base.pth
	@$(RAY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt 'ray[train]'
	@test -x $(TORCHFT_VENV)/bin/python || $(PYTHON) -m venv $(TORCHFT_VENV)
	@readlink -f $(VENV)/lib/python*/site-packages > $$(echo $(TORCHFT_VENV)/lib/python*/site-packages)/base.pth
	@$(TORCHFT_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torchft
	@$(BIN)/pytest -n $(PYTEST_WORKERS) tests/integrations

test-all: setup lint
	@$(BIN)/pytest -n $(PYTEST_WORKERS) -m "not nightly and not gpu"

lint: setup
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@for config in pyproject.toml $(TRAINER); do \
	  report=$$($(BIN)/lint-imports --config $$config) || { echo "$$report"; exit 1; }; done

format: setup
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

bench: setup
	@$(BIN)/python -m bench

bench-groups: setup
	@$(BIN)/python -m bench.groups

## The site reads the source without importing it: neither torch nor Holdfast is installed for it.
$(DOCS_READY): pyproject.toml constraints.txt
	@echo "Setting up $(DOCS_VENV) …"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $(DOCS_VENV)/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
	  --requirement $(DOCS_VENV)/requirements.txt
	@touch $@

docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(PYTHON) -m http.server --directory site"

trace: setup
	@$(BIN)/python -m tools.trace

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(TITAN_VENV) $(RAY_VENV) $(TORCHFT_VENV) site demo/out bench/out .mypy_cache .ruff_cache .hypothesis .import_linter_cache
