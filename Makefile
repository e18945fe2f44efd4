# Every target sets itself up: a virtual environment in .venv, made once, made again when the lock or pyproject.toml changes.
# PYTHON picks the interpreter (3.11 or newer): make test PYTHON=python3.12

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
REFBIN := .venv-reference/Scripts
else
BIN := .venv/bin
REFBIN := .venv-reference/bin
endif

EXTRAS := cpu,media,hub,dev
REFERENCE := torch==2.13.0 transformers==5.24.0 peft==0.21.2
PYTEST_ARGS ?=
OFFLINE := not reference and not shared and not gpu

.DELETE_ON_ERROR:
.PHONY: help setup setup-reference check format test quick demo fuzz repro repro-short rehearse rehearse-short test-reference test-shared test-shared-full goldens lock clean

help:
	@echo "make demo              synthetic checkpoint -> package -> text from an image and an audio clip, with parity"
	@echo "make test              the whole test suite: no torch, no network"
	@echo "make quick             unit, fault and command line tests"
	@echo "make check             ruff, mypy --strict, import-linter, lengths, arithmetic that differs between machines"
	@echo "make repro             the same bytes under every condition this machine can play; repro-short in CI"
	@echo "make rehearse          the GitHub action in every mode, the hooks, the container's lines; rehearse-short in CI"
	@echo "make fuzz              20,000 damaged files against every reader of foreign files"
	@echo "make test-reference    derive the stored goldens again from PyTorch and compare live (installs torch apart)"
	@echo "make test-shared       tests against extra material beside the clone, if any (CONTRIBUTING.md); test-shared-full: all"
	@echo "make goldens           write tests/goldens again from the PyTorch reference"
	@echo "make lock              write requirements.lock again"
	@echo "make format            let ruff format the code"
	@echo "make clean             remove virtual environments, caches and build folders"

setup: .venv/stamp

setup-reference: .venv-reference/stamp

.venv/stamp: requirements.lock pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/setup_venv.sh .venv "$(EXTRAS)"

.venv-reference/stamp: requirements.lock pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/setup_venv.sh .venv-reference "$(EXTRAS)" $(REFERENCE)

check: setup
	$(BIN)/ruff check phi4mm_export tests scripts examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_lengths.py
	$(BIN)/python scripts/check_exactness.py

format: setup
	$(BIN)/ruff format phi4mm_export tests scripts examples

test: setup
	$(BIN)/python -m pytest -m "$(OFFLINE)" $(PYTEST_ARGS)

quick: setup
	$(BIN)/python -m pytest -m "$(OFFLINE) and not slow" tests/unit tests/faults tests/cli $(PYTEST_ARGS)

demo: setup
	$(BIN)/python scripts/demo.py

fuzz: setup
	$(BIN)/python scripts/fuzz.py --count 20000 --jobs 2

repro: setup
	$(BIN)/python scripts/repro.py

repro-short: setup
	$(BIN)/python scripts/repro.py --short

rehearse: setup
	PYTHON=$(BIN)/python scripts/ci_rehearsal.sh

rehearse-short: setup
	PYTHON=$(BIN)/python scripts/ci_rehearsal.sh --short

test-reference: setup-reference
	$(REFBIN)/python -m pytest -m "reference and not shared and not gpu" $(PYTEST_ARGS)

test-shared: setup-reference
	$(REFBIN)/python -m pytest -m "shared and not slow and not gpu" $(PYTEST_ARGS)

test-shared-full: setup-reference
	$(REFBIN)/python -m pytest -m "shared and not gpu" $(PYTEST_ARGS)

goldens: setup-reference
	$(REFBIN)/python scripts/make_goldens.py

lock:
	PYTHON="$(PYTHON)" sh scripts/lock.sh

clean:
	rm -rf .venv .venv-reference .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf phi4mm.egg-info
	find phi4mm_export tests scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +
