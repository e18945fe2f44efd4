# Step "Plan": refuses a disk that is too small, and names the cache of the stages.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if phi4mm build --show -- "$PHI4MM_RECIPE" 2> "$home/stderr" | compares; then streams=(); fi
target=$(dirname "$PHI4MM_OUTPUT")
mkdir -p "$target" "$work"
plan=(plan --recipe "$PHI4MM_RECIPE" "${revision[@]}" "${calibration[@]}")
plainly "$report/plan.txt" "${plan[@]}" "${streams[@]}" --check-disk "$target" -- "$model"
key=$(phi4mm "${plan[@]}" --key -- "$model")
echo "content key $key"
output key "$key"
