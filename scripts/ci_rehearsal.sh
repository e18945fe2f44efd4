#!/usr/bin/env bash
# Runs the steps of action.yml in every mode, the pre-commit hooks and the lines of the Dockerfile on this machine.
#
#   scripts/ci_rehearsal.sh [--short] [--no-container] [--folder DIR]
#
# --short: build, verify, hooks and refusals; what the tests of continuous integration run. Needs `make setup` once.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" scripts/rehearse_ci.py "$@"
