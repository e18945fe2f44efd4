# Step "Build again and compare": mode rebuild-compare. Exit code 5 and the differences where a byte is another.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if cat "${PHI4MM_PACKAGE%/README.md}/phi4mm.json" 2> "$home/stderr" | compares; then streams=(); fi
from=("${streams[@]}")
if [ -n "$model" ]; then from+=(--model "$model"); fi
mkdir -p "$(dirname "$PHI4MM_OUTPUT")"
plainly "$report/rebuild.txt" rebuild "${from[@]}" "${calibration[@]}" --output "$PHI4MM_OUTPUT" -- "$PHI4MM_PACKAGE"
