#!/bin/sh
# Writes requirements.lock: exact versions with hashes for Python 3.11 on every platform, without torch and without index lines.
#
# setuptools is locked too, because the project itself is built from it without build isolation.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet uv
echo 'setuptools>=77' > "$work/build.in"
"$work/venv/bin/uv" pip compile pyproject.toml "$work/build.in" \
    --extra cpu --extra media --extra hub --extra dev \
    --python-version 3.11 --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet \
    --output-file "$work/lock"
{
    echo "# Python 3.11, extras cpu, media, hub and dev. Written by: make lock"
    cat "$work/lock"
} > requirements.lock
if grep -Eq '://|^-|^torch==' requirements.lock; then
    echo "error: requirements.lock holds an address, an option line or torch" >&2
    exit 1
fi
