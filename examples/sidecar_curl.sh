#!/bin/sh
# Fetch one page politely with curl and `gatekeeper serve`: take a lease, fetch, report.
#
#     sh examples/sidecar_curl.sh https://example.org/ page.html
set -eu
base=${GATEKEEPER_URL:-http://127.0.0.1:8750}
agent='examplebot/1.0 (+https://example.org/bot)'
url=$1
file=$2

ask() { # ask PATH JSON: print the sidecar's response
    curl -sS "$base$1" -H 'Content-Type: application/json' \
        ${GATEKEEPER_TOKEN:+-H "Authorization: Bearer $GATEKEEPER_TOKEN"} -d "$2"
}

answer=$(ask /v1/leases "{\"url\": \"$url\", \"wait\": 30, \"user_agent\": \"$agent\"}")
lease=$(printf %s "$answer" | sed -n 's/.*"id":"\([^"]*\)","url".*/\1/p')
if [ -z "$lease" ]; then
    printf 'no lease: %s\n' "$answer" >&2
    exit 1
fi
# curl prints 000 if there was no response.
status=$(curl -sS -A "$agent" -o "$file" -w '%{http_code}' "$url") || status=000
case $status in
000) report='{}' ;;
*) report="{\"status\": $status}" ;;
esac
ask "/v1/leases/$lease/report" "$report"
echo "$url $status"
