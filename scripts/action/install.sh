# Step "Install phi4mm": this checkout of the action, with the exact versions and hashes of requirements-run.lock.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if ! python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    fail 6 "phi4mm action" "the lock file is for Python 3.11, found $(python --version 2>&1)"
fi
if ! python -m venv "$home/venv" > "$home/stderr" 2>&1; then
    # A Python without ensurepip, as some systems have: its own pip fills the environment.
    rm -rf "$home/venv"
    python -m venv --without-pip "$home/venv"
    python -m pip --python "$home/venv" install --quiet pip
fi
if [ -d "$home/venv/Scripts" ]; then bin=$home/venv/Scripts; else bin=$home/venv/bin; fi
"$bin/python" -m pip install --quiet --require-hashes -r "$root/requirements-run.lock"
"$bin/python" -m pip install --quiet --no-deps --no-build-isolation "$root"

if [ -n "$PHI4MM_EXTRAS" ]; then
    echo "::notice title=phi4mm action::the extras $PHI4MM_EXTRAS are not in the lock file and are resolved now"
    sed -n 's/ *\\$//; /^[A-Za-z0-9].*==/p' "$root/requirements-run.lock" > "$home/constraints"
    "$bin/python" -m pip install --quiet --no-build-isolation --constraint "$home/constraints" \
        "${root}[$PHI4MM_EXTRAS]"
fi
phi4mm --version
