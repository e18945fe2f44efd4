# Step "Check": validate and verify, both of them even if the first finds something.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

package=$PHI4MM_OUTPUT
if [ "$PHI4MM_MODE" = verify ]; then package=$PHI4MM_PACKAGE; fi
expect=()
if [ -n "$PHI4MM_EXPECT" ]; then expect=(--expect "$PHI4MM_EXPECT"); fi

code=0
phi4mm validate --format github -- "$package" | tee "$report/validate.txt" || code=$?
phi4mm verify --format github "${expect[@]}" -- "$package" | tee "$report/verify.txt" || code=$?
output package "$package"
exit "$code"
