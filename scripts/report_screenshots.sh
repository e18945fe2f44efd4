#!/bin/sh
# Look at a report in a real browser: light, dark, a phone's width, and printed.
#
#   scripts/report_screenshots.sh REPORT_DIR OUT_DIR
#
# Needs chromium (Debian: apt-get install chromium) and, for the printed pages as pictures, pdftoppm (poppler-utils).
set -eu
if [ $# -ne 2 ] || [ ! -f "$1/index.html" ]; then
    echo "usage: $0 REPORT_DIR OUT_DIR    (REPORT_DIR holds index.html)" >&2
    exit 2
fi
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
    echo "error: chromium is not installed" >&2
    exit 6
}
page="file://$(cd "$1" && pwd)/index.html"
mkdir -p "$2"
out=$(cd "$2" && pwd)
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

shoot() { # shoot NAME WIDTH HEIGHT [FLAG...]
    name=$1 width=$2 height=$3
    shift 3
    "$browser" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
        --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile" \
        --window-size="$width,$height" "$@" "$page" >/dev/null 2>&1
    echo "$out/$name"
}

# A window narrower than 500 pixels is refused by some builds: the phone is shown in a frame of its width.
cat >"$profile/phone.html" <<EOF
<!DOCTYPE html><style>html,body{margin:0;height:100%;background:#777}iframe{display:block;width:390px;height:100%;border:0}</style>
<iframe src="$page"></iframe>
EOF

shoot light.png 1200 "${HEIGHT:-6000}" --screenshot="$out/light.png" --blink-settings=preferredColorScheme=1
shoot dark.png 1200 "${HEIGHT:-6000}" --screenshot="$out/dark.png" --blink-settings=preferredColorScheme=0
desktop=$page
page="file://$profile/phone.html"
shoot phone.png 520 "${PHONE_HEIGHT:-9000}" --screenshot="$out/phone.png" --blink-settings=preferredColorScheme=1
page=$desktop
shoot print.pdf 1200 1600 --print-to-pdf="$out/print.pdf" --no-pdf-header-footer
if command -v pdftoppm >/dev/null; then
    pdftoppm -r 60 -png "$out/print.pdf" "$out/print"
fi
