#!/bin/sh
# Makes the virtual environment at $1.  On a bare Debian or Ubuntu the venv module is a package of its own: it is
# installed where that needs no password, else the command to type is printed.
set -eu
venv=$1
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null; then
  echo "make: no $python on PATH" >&2
  echo "  hint: install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2
  exit 3
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "make: $python is $("$python" -V 2>&1), expected Python 3.11 or newer" >&2
  echo "  hint: make PYTHON=python3.12" >&2
  exit 3
fi

if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "make: installing $package with apt-get …" >&2
    apt-get update -qq && apt-get install -y -qq "$package"
  elif sudo -n true 2>/dev/null && command -v apt-get >/dev/null; then
    echo "make: installing $package with sudo apt-get …" >&2
    sudo -n apt-get update -qq && sudo -n apt-get install -y -qq "$package"
  else
    echo "make: $python has no venv module" >&2
    echo "  hint: apt-get install $package" >&2
    exit 3
  fi
fi
"$python" -m venv "$venv"
