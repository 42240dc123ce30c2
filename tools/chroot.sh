# What the tools share that install a Debian into a folder and run this checkout there. Source it; it is not a program.
#
# The folder uses this machine's name resolution and certificate authorities: pip goes where it goes here.

tool="${BASH_SOURCE[1]##*/}"
source_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
unset PYTHONHOME PYTHONPATH # a test that runs the tool has set them
export DEBIAN_FRONTEND=noninteractive

give_up() { # says why, and ends
  echo "tools/$tool: $1" >&2
  exit 1
}

quietly() { # runs a command; shows its output only if it fails
  local log
  log="$(mktemp)"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 30 "$log" >&2
    rm -f "$log"
    give_up "failed: $*"
  fi
  rm -f "$log"
}

in_a_mount_namespace() { # starts the tool again with these arguments, where no mount is left behind however it ends
  [[ "$(id -u)" == 0 ]] || give_up "it needs root; run it with sudo"
  if [[ -z "${STAGEC_UNSHARED:-}" ]]; then
    STAGEC_UNSHARED=1 exec unshare --mount --propagation private "$0" "$@"
  fi
  unset STAGEC_UNSHARED
}

debian() { # debian SUITE FOLDER PACKAGE...: installs that Debian, and mounts what programs expect
  local suite="$1" root="$2" waiting
  shift 2
  mkdir -p "${root%/*}"
  exec {waiting}>"$root.lock" # tools share a folder
  flock "$waiting"
  if [[ ! -e "$root/ready" ]]; then
    echo "tools/$tool: installing Debian $suite with $* into $root" >&2
    if ! command -v debootstrap >/dev/null; then
      quietly apt-get update --quiet
      quietly apt-get install --yes --quiet --no-install-recommends debootstrap
    fi
    rm -rf --one-file-system "$root"
    mkdir -p "$root"
    quietly debootstrap --variant=minbase "$suite" "$root"
  fi
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys" # libtpu counts the CPUs there
  if [[ ! -e "$root/ready" ]] || ! chroot "$root" dpkg --status "$@" >/dev/null 2>&1; then
    # A mirror may be some days behind: its Release file says until when it is valid.
    quietly chroot "$root" apt-get -o Acquire::Check-Valid-Until=false update --quiet
    quietly chroot "$root" apt-get install --yes --quiet --no-install-recommends "$@"
    touch "$root/ready"
  fi
  mkdir -p "$root/etc/ssl/certs"
  cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  exec {waiting}>&-
}

login=root # who `as_a_login` is; where $plain is not empty, `within` is a plain chroot

within() { # within FOLDER COMMAND...: runs it where the folder is all there is
  # Not by chroot alone, where that is not asked for: there nobody can have a user namespace, which Bazel's sandbox and
  # stagec's workers need.
  if [[ -n "${plain:-}" ]]; then
    chroot "$@"
    return
  fi
  unshare --mount --propagation private /bin/bash -c '
    set -e
    mount --rbind "$0" "$0"
    cd "$0"
    mkdir -p host
    pivot_root . host
    exec chroot . /bin/bash -c "umount --lazy /host && exec \"\$@\"" bash "$@"
  ' "$@"
}

bare_machine() { # bare_machine PACKAGE...: makes a Debian with these packages in a new folder, $root, until the tool ends
  root="${STAGEC_BARE_ROOT:-${TMPDIR:-/tmp}/stagec-bare-machine}"
  rm -rf --one-file-system "$root"
  trap leave EXIT
  debian "${STAGEC_BARE_DEBIAN:-bookworm}" "$root" "$@"
}

leave() { # ends what Bazel was started in $root, and removes the folder
  for login in $(chroot "$root" sh -c 'ls /home' 2>/dev/null; echo root); do
    as_a_login 'for file in ~/*/WORKSPACE; do cd "${file%/*}" && bazel shutdown; done' >/dev/null 2>&1 || true
  done
  umount --recursive --lazy "$root"/{proc,dev,sys} 2>/dev/null || true
  rm -rf --one-file-system "$root"
}

clone() { # clones the last commit of this checkout into the home of $login in $root
  if [[ -n "$(git -C "$source_root" status --porcelain)" ]]; then
    echo "tools/$tool: there are changes that are not committed; the last commit is tried without them" >&2
  fi
  git clone --quiet --no-local "$source_root" "$root$(home)/stagec"
  chroot "$root" chown --recursive "$login:" "$(home)/stagec"
}

home() { # prints that of $login in $root
  chroot "$root" sh -c 'getent passwd "$0" | cut -d: -f6' "$login"
}

as_a_login() { # as_a_login SCRIPT ARGUMENT...: runs it in $root, with a login's variables and those that say whence packages come
  local variables=("HOME=$(home)" "USER=$login" LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  mapfile -t -O "${#variables[@]}" variables < <(env | grep -iE '^(PIP_[A-Z_]+|SSL_CERT_FILE|[a-z]+_proxy)=' || true)
  within "$root" runuser -u "$login" -- env -i "${variables[@]}" /bin/bash -c "$1" bash "${@:2}"
}
