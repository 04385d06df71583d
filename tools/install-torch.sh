#!/bin/sh
# Installs the trainer's torch: install-torch.sh ENVIRONMENT [REQUIREMENT].  Where torch is there, nothing is done.
# Without a requirement it is the version of requirements/torch.txt, in the build that the index prefers for this
# machine, and that file's hash must be listed.  A requirement is installed as named.
set -eu
python=$1/bin/python
pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' && exit
say() { echo "make: fetches $1 now: 0.2 GB without CUDA, several GB with it (docs/testing.md); pip names each file's size" >&2; }
if [ -n "${2-}" ]; then
  say "$2"
  pip install "$2"
  exit
fi
lock=requirements/torch.txt
wanted=$(grep -o '^torch==[0-9.]*' "$lock")
folder=$1/torch
trap 'rm -rf "$folder"' EXIT
say "$wanted"
pip download --no-deps --dest "$folder" "$wanted"
# Python compiles what it imports; to compile all of torch's files takes longer than to install them.
if ! pip install --no-compile --quiet --no-deps --no-index --find-links "$folder" --require-hashes -r "$lock"; then
  echo "make: this index serves another build of $wanted than those of $lock: $(ls "$folder")" >&2
  echo "  hint: make TORCH=$wanted takes it unchecked; docs/testing.md" >&2
  exit 1
fi
pip install --no-compile "$wanted"
