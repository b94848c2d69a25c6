#!/bin/sh
# Replace the workers of the compose file one by one, by ones of the present image and settings.
#
#   sh deploy/roll.sh [NAME OF THE PROJECT]
#
# A new worker is started and ready before an old one is stopped, so capacity never falls; the old
# one hands its requests to its peers, and their readers go on at the next token. COMPOSE is the
# command to use, with its --file options; GRACE_S what a worker gets for its hand-over.
set -eu

if [ -z "${COMPOSE:-}" ]; then
    COMPOSE="docker compose"
    $COMPOSE version >/dev/null 2>&1 || COMPOSE=docker-compose
fi
compose() { $COMPOSE ${project:+--project-name "$project"} "$@"; }
project=${1:-}

await_ready() {
    for each in $(compose ps --quiet worker); do
        until [ "$(docker inspect --format '{{.State.Health.Status}}' "$each")" = healthy ]; do
            state=$(docker inspect --format '{{.State.Status}}' "$each")
            [ "$state" = running ] || { echo "$each is $state: see its log" >&2; exit 1; }
            sleep 1
        done
    done
}

old=$(compose ps --quiet worker)
number=$(echo "$old" | wc -w)
for container in $old; do
    compose up --detach --no-deps --no-recreate --scale worker=$((number + 1)) worker
    await_ready
    docker stop --time "${GRACE_S:-40}" "$container" >/dev/null
    docker rm "$container" >/dev/null
    echo "replaced $container"
done
