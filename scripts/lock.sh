#!/bin/sh
# Writes requirements.lock: exact versions with hashes for Python 3.11 on every platform, without torch and without index lines.
# And requirements-run.lock: of these the ones that using the project needs, for the action and the container.
#
# setuptools is locked too, because the project itself is built from it without build isolation.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet uv
echo 'setuptools>=77' > "$work/build.in"

# compile TITLE FILE OPTION...
compile() {
    title=$1 file=$2
    shift 2
    "$work/venv/bin/uv" pip compile pyproject.toml "$work/build.in" "$@" \
        --python-version 3.11 --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet \
        --output-file "$work/lock"
    { echo "# Python 3.11, $title. Written by: make lock"; cat "$work/lock"; } > "$file"
    rm "$work/lock"
    if grep -Eq '://|^-|^torch==' "$file"; then
        echo "error: $file holds an address, an option line or torch" >&2
        exit 1
    fi
}

compile "extras cpu, media, hub and dev" requirements.lock --extra cpu --extra media --extra hub --extra dev
compile "extras cpu, media and hub" requirements-run.lock --extra cpu --extra media --extra hub \
    --constraint requirements.lock
