#!/bin/sh
# What a machine needs before anything is installed: Python 3.11 or later with venv and headers, a C++ compiler.
# The searches, and hnswlib, are compiled from source; without these their build fails late and unreadably.
python="${PYTHON:-python3}"
missing=""
want() { missing="$missing
  - $1"; }

if ! command -v "$python" >/dev/null 2>&1; then
    want "Python 3.11 or later ($python was not found; Debian: apt-get install python3 python3-venv python3-dev)"
else
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        want "Python 3.11 or later ($python is $("$python" -V 2>&1)); name another: make PYTHON=python3.12 ..."
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        want "Python's venv module (Debian: apt-get install python3-venv)"
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
    [ -f "$header" ] || want "Python's headers ($header is missing; Debian: apt-get install python3-dev)"
fi
command -v "${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 ||
    want "a C++ compiler (Debian: apt-get install g++; macOS: xcode-select --install)"

if [ -n "$missing" ]; then
    printf 'This machine lacks what bidmatch is built with (the searches and hnswlib are compiled from source):%s\n' "$missing" >&2
    exit 1
fi
