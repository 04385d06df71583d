#!/bin/sh
# Installs the Slurm that the tests start, with the packages of Debian or Ubuntu, where that needs no password.  The
# tests use daemons, keys and folders of their own, whatever the packages start.  Where Slurm cannot be had the tests
# that need it are skipped and say so, unless RLK_REPRO_REQUIRE_SLURM is set.  `--all` adds slurmdbd and MariaDB for
# accounting, podman for containers, and what the tests build images with.
set -eu
packages='slurmctld slurmd slurm-client munge'
programs='slurmctld slurmd sbatch munged'
if [ "${1:-}" = --all ]; then
  packages="$packages slurmdbd mariadb-server podman runc buildah skopeo docker-registry mmdebstrap"
  programs="$programs slurmdbd mariadbd podman runc buildah skopeo docker-registry mmdebstrap"
fi

PATH="$PATH:/usr/sbin:/sbin"
missing=
for program in $programs; do
  command -v "$program" >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
  sudo=
elif sudo -n true 2>/dev/null; then
  sudo='sudo -n'
else
  sudo=none
fi
if [ "$sudo" = none ] || ! command -v apt-get >/dev/null; then
  echo "make: no Slurm for the tests (missing:$missing)" >&2
  echo "  hint: apt-get install --no-install-recommends $packages" >&2
  [ -z "${RLK_REPRO_REQUIRE_SLURM:-}" ] || exit 3
  exit 0
fi
echo "make: installing $packages with apt-get …" >&2
# shellcheck disable=SC2086 # words
$sudo apt-get update -qq &&
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
