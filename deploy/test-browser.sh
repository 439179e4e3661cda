# Sourced by `make test`: the page's test drives a real Chromium. Installs Debian's where that is possible;
# elsewhere says that the test is left out.
if ! command -v chromium >/dev/null 2>&1 || ! command -v chromedriver >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "Installing Debian's chromium and chromium-driver for the page's test ..."
        { apt-get update -q && apt-get install -q -y chromium chromium-driver; } >/dev/null 2>&1 ||
            echo "chromium could not be installed"
    fi
fi
if ! command -v chromium >/dev/null 2>&1 || ! command -v chromedriver >/dev/null 2>&1; then
    if [ -n "${CI:-}" ]; then
        echo "chromium is missing: in CI the page's test is not left out" >&2
    else
        echo "No chromium and chromedriver here: the page's test is left out (Debian: apt-get install chromium chromium-driver)"
        BIDMATCH_NO_BROWSER=1
        export BIDMATCH_NO_BROWSER
    fi
fi
