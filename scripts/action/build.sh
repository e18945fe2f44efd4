# Step "Build": the package of mode build.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if phi4mm build --show -- "$PHI4MM_RECIPE" 2> "$home/stderr" | compares; then streams=(); fi
plainly "$report/build.txt" build --model "$model" "${revision[@]}" "${streams[@]}" "${calibration[@]}" \
    --output "$PHI4MM_OUTPUT" --work-dir "$work" -- "$PHI4MM_RECIPE"
