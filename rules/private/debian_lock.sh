#!/usr/bin/env bash
# Which packages of Debian compile for aarch64, and where they are. Needs apt-get, on a Debian of any release and architecture.
#
#   debian_lock.sh archives          prints the archives that apt-get is set to: .../debian and .../debian-security
#   debian_lock.sh lock ARCHIVE...   prints a new compiler/aarch64.lock, of what Debian has signed
set -euo pipefail

suite=bookworm
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"/{lists,cache/archives}/partial
own=(-o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Dir::State::status=/dev/null)

archives() {
  apt-get "${own[@]}" --print-uris update | sed -nE "s|^'(https?://[^']+/debian(-security)?)/dists/.*|\1|p" | sort -u
}

packages() { # packages ARCHITECTURE NAME...: a line for each package: its SHA-256, and its path from the archive's name on
  local architecture="$1"
  shift
  local options=(-qq "${own[@]}" -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture"
    -o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "APT::Sandbox::User=$(id -un)" -o Acquire::ForceHash=SHA256)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" --print-uris download "$@" |
    sed -nE "s,^'https?://[^']*/(debian(-security)?/pool/[^']*)' [^ ]* [0-9]+ SHA256:([0-9a-f]+)\$,\3 \1,p" |
    sed 's/%3a/%3A/g; s/%2b/+/g' | sort -k 2
}

lock() { # lock ARCHIVE...
  local archive
  for archive in "$@"; do
    local security="${archive##*/debian}" # "" or -security
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite$security main"
  done >"$folder/sources.list"
  echo "# Debian $suite's Python that compiles for aarch64, and the emulator that runs it on x86-64: the SHA-256 of each package,"
  echo "# and its path in Debian's archives. rules/private/debian_lock.sh wrote this."
  packages amd64 qemu-user-static
  packages arm64 libbz2-1.0 libc6 libexpat1 libffi8 libgcc-s1 liblzma5 libpython3.11-minimal libpython3.11-stdlib \
    libstdc++6 python3.11-minimal zlib1g
}

"$@"
