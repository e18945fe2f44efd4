# Step "Check the inputs": says what is missing before anything is fetched.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

need() {
    if [ -z "$2" ]; then fail 2 "phi4mm action" "mode $PHI4MM_MODE needs the input $1"; fi
}

case $PHI4MM_MODE in
    build)
        need recipe "$PHI4MM_RECIPE"
        need model "$PHI4MM_MODEL"
        ;;
    verify) need package "$PHI4MM_PACKAGE" ;;
    rebuild-compare) need package "$PHI4MM_PACKAGE" ;;
    *) fail 2 "phi4mm action" "expected mode build, verify or rebuild-compare, found $PHI4MM_MODE" ;;
esac
case $PHI4MM_EXTRAS in
    *[!a-z,]*) fail 2 "phi4mm action" "expected extras as names with commas between them, found $PHI4MM_EXTRAS" ;;
esac
case $PHI4MM_CACHE in
    true | false) ;;
    *) fail 2 "phi4mm action" "expected cache true or false, found $PHI4MM_CACHE" ;;
esac
if [ -n "$PHI4MM_EXPECT" ] && [ ! -f "$PHI4MM_EXPECT" ]; then
    fail 2 "phi4mm action" "the lock file $PHI4MM_EXPECT is not there; write one with: phi4mm verify PACKAGE --write-lock FILE"
fi
output report "$report"
output work "$work"
