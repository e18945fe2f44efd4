#!/bin/sh
# Makes a virtual environment with this project in it: setup_venv.sh FOLDER EXTRAS [REQUIREMENT...]
#
# Python 3.11 takes the exact versions and hashes of requirements.lock, any other Python resolves afresh.
# The requirements named at the end are installed apart, after the rest. FOLDER/stamp says that all went well.
set -eu

folder=$1 extras=$2
shift 2
if [ -z "${PYTHON:-}" ]; then
    echo "error: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3.11" >&2
    exit 6
fi
case $PYTHON in */*) ;; *) PYTHON=$(command -v "$PYTHON") ;; esac
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

echo "setting up $folder for Python $version"
rm -rf "$folder"
if ! "$PYTHON" -m venv "$folder" 2>/dev/null; then
    # A Python without ensurepip: its own pip fills the new environment.
    rm -rf "$folder"
    "$PYTHON" -m venv --without-pip "$folder"
    "$PYTHON" -m pip --python "$folder" install --quiet pip
fi
if [ -d "$folder/Scripts" ]; then python=$folder/Scripts/python; else python=$folder/bin/python; fi

if [ "$version" = 3.11 ]; then
    "$python" -m pip install --quiet --require-hashes -r requirements.lock
    "$python" -m pip install --quiet --no-deps --no-build-isolation --editable .
else
    "$python" -m pip install --quiet --editable ".[$extras]"
fi
if [ $# -gt 0 ]; then
    echo "installing $* into $folder"
    "$python" -m pip install --quiet "$@"
fi
: > "$folder/stamp"
