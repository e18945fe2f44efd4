# Step "Report": digest and class of the package, as outputs and in the summary.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

output package "$PHI4MM_CHECKED"
"$bin/python" "$root/scripts/action/facts.py" "$PHI4MM_CHECKED" > "$home/facts"
while IFS= read -r line; do
    output "${line%%=*}" "${line#*=}"
done < "$home/facts"
