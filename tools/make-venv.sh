#!/bin/sh
# Usage: PYTHON=python3 make-venv.sh FOLDER
# Make a virtual environment with $PYTHON, or with the newest python3.x found when that is too old.
set -eu

venv=$1
is_recent='import sys; sys.exit(sys.version_info < (3, 11))'

for python in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c "$is_recent" 2>/dev/null; then
        found=$python
        break
    fi
done
if [ -z "${found:-}" ]; then
    echo "setup: Tokenmill needs Python 3.11 or newer; install one and run 'make setup PYTHON=python3.11'" >&2
    exit 1
fi

echo "setup: making $venv with $("$found" --version)"
if ! "$found" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "setup: this Python cannot make virtual environments;" \
        "on Debian or Ubuntu: sudo apt install python3-venv (or python$version-venv)" >&2
    exit 1
fi
"$found" -m venv "$venv"
