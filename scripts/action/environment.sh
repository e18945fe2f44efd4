# Sourced by every step of action.yml: where things lie, and how a step speaks to the runner.
#
# Inputs come in as PHI4MM_* variables and are never part of a line that a shell reads. The working directory is the
# caller's workspace: nothing in it may be imported, so Python is kept from looking there.
set -eo pipefail  # without -u: the bash of macOS takes an empty list for an unset one
export PYTHONSAFEPATH=1 PYTHONUTF8=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
home=$RUNNER_TEMP/phi4mm
report=$home/report
work=$home/work
mkdir -p "$report"
if [ -d "$home/venv/Scripts" ]; then bin=$home/venv/Scripts; else bin=$home/venv/bin; fi

# fail CODE TITLE MESSAGE: one annotation, and the end.
fail() {
    local message=$3
    message=${message//'%'/%25}
    message=${message//$'\r'/%0D}
    message=${message//$'\n'/%0A}
    echo "::error title=$2::$message"
    exit "$1"
}

# output NAME VALUE: an output of the step. A line break would start another output.
output() {
    case $2 in *$'\n'* | *$'\r'*) fail 2 "phi4mm action" "the value of $1 has a line break" ;; esac
    printf '%s=%s\n' "$1" "$2" >> "$GITHUB_OUTPUT"
}

# phi4mm ARGUMENT...: the command itself; what it prints are workflow commands only with --format github.
phi4mm() {
    "$bin/phi4mm" "$@"
}

# plainly FILE ARGUMENT...: phi4mm with its results in FILE and in the log. Nothing that it prints is read as a command by
# the runner; its last error becomes an annotation.
plainly() {
    local file=$1 token code
    shift
    token=$("$bin/python" -c 'import secrets; print(secrets.token_hex(16))')
    echo "::stop-commands::$token"
    set +e
    phi4mm "$@" 2>&1 > "$file" | tee "$home/stderr"
    code=${PIPESTATUS[0]}
    set -e
    cat "$file"
    echo "::$token::"
    if [ "$code" != 0 ]; then
        fail "$code" "phi4mm $1" "$(tail -n 1 "$home/stderr")"
    fi
}

# Arguments for MODEL: a folder, or OWNER/NAME, or OWNER/NAME@COMMIT. A hub model is read in ranges: the disk of a hosted
# runner does not hold both checkpoint and package. `streams` is left empty for a folder.
model=${PHI4MM_MODEL:-}
revision=()
streams=()
if [ ! -d "$model" ]; then
    streams=(--stream)
    if [ "${model#*@}" != "$model" ]; then
        revision=(--revision "${model#*@}")
        model=${model%%@*}
    fi
fi
calibration=()
if [ -n "${PHI4MM_CALIBRATION:-}" ]; then calibration=(--calibration "$PHI4MM_CALIBRATION"); fi

# compares: reads a recipe and says whether it compares the package with the model, whose weights then have to be fetched.
compares() {
    [ "$(grep -cE '^ *"?against"? ?[=:] "model",?$')" != 0 ]
}
