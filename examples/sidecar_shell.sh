#!/bin/sh
# A polite crawl with the shell and curl: URLs from standard input, pages into a folder.
# `gatekeeper serve` decides, waits until each host is due, and fetches.
#
#     sh examples/sidecar_shell.sh pages <urls.txt
set -eu
base=${GATEKEEPER_URL:-http://127.0.0.1:8750}
folder=$1
tries=3
mkdir -p "$folder"
head=$(mktemp)
trap 'rm -f "$head"' EXIT

field() { # field NAME: print a header of the last response
    sed -n "s/^$1: *\([^[:cntrl:]]*\).*/\1/Ip" "$head" | tail -n 1
}

page() { # page URL FILE: print the status of the response, or 000 if there was none
    curl -sSG "$base/v1/fetch" --data-urlencode "url=$1" -D "$head" -o "$2" -w '%{http_code}' \
        ${GATEKEEPER_TOKEN:+-H "Authorization: Bearer $GATEKEEPER_TOKEN"} || true
}

number=0
while read -r url; do
    number=$((number + 1))
    file=$folder/$number
    attempt=1
    while :; do
        status=$(page "$url" "$file")
        seconds=$(field Retry-After)
        # A 429 or 503 of the sidecar itself, not of a site, says when to try again.
        case $status:$(field X-Gatekeeper-Verdict) in
        429: | 503:) ;;
        *) break ;;
        esac
        [ "$attempt" -lt "$tries" ] && [ "${seconds:-1}" -le 60 ] || break
        attempt=$((attempt + 1))
        sleep "${seconds:-1}"
    done
    # A problem document of the sidecar instead of a page.
    case $(field Content-Type) in
    application/problem+json*) status="$status $(sed -n 's/.*"detail":"\([^"]*\)".*/\1/p' "$file")" ;;
    esac
    echo "$url $status"
done
