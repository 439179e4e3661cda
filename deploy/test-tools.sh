# Sourced by `make test`: one test drives a real Chromium, one a real Prometheus, one types the tutorials' commands.
# Installs Debian's where that is possible; elsewhere says which test is left out.

# need PACKAGES COMMANDS VARIABLE TEST: installs what has a command missing; VARIABLE=1 leaves the test out.
need() {
    for command in $2; do
        if ! command -v "$command" >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            echo "Installing Debian's $1 for $4 ..."
            # shellcheck disable=SC2086
            { apt-get update -q && apt-get install -q -y --no-install-recommends $1; } >/dev/null 2>&1 ||
                echo "$1 could not be installed"
            break
        fi
    done
    for command in $2; do
        command -v "$command" >/dev/null 2>&1 && continue
        if [ -n "${CI:-}" ]; then
            echo "$command is missing: in CI $4 is not left out" >&2
        else
            echo "No $command here: $4 is left out (Debian: apt-get install $1)"
            export "$3=1"
        fi
        break
    done
}

need "chromium chromium-driver" "chromium chromedriver" BIDMATCH_NO_BROWSER "the page's test"
need "prometheus" "prometheus promtool" BIDMATCH_NO_PROMETHEUS "the monitoring's test"
need "bash curl jq" "bash curl jq" BIDMATCH_NO_TUTORIALS "the tutorials' test"
