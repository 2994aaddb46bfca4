#!/bin/sh
# A crawl with the shell and curl: URLs on standard input, pages into a folder, polite through
# `gatekeeper serve`, which decides, waits for each host's turn and fetches.
#
#     sh examples/sidecar_shell.sh pages <urls.txt
set -eu
base=${GATEKEEPER_URL:-http://127.0.0.1:8750}
folder=$1
tries=3
mkdir -p "$folder"
head=$(mktemp)
trap 'rm -f "$head"' EXIT

field() { # field NAME: a header of the last answer
    sed -n "s/^$1: *\([^[:cntrl:]]*\).*/\1/Ip" "$head" | tail -n 1
}

page() { # page URL FILE: the status of the answer; 000 where nobody answered
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
        # The sidecar's own 429 or 503, of an answer that no site gave: it says when to come again.
        case $status:$(field X-Gatekeeper-Verdict) in
        429: | 503:) ;;
        *) break ;;
        esac
        [ "$attempt" -lt "$tries" ] && [ "${seconds:-1}" -le 60 ] || break
        attempt=$((attempt + 1))
        sleep "${seconds:-1}"
    done
    # A problem document of ours, in the place of a page.
    case $(field Content-Type) in
    application/problem+json*) status="$status $(sed -n 's/.*"title":"\([^"]*\)".*/\1/p' "$file")" ;;
    esac
    echo "$url $status"
done
