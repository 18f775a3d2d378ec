#!/usr/bin/env bash
# Installs the system packages that the build, the tests and the benchmarks need: through apt when root, else says which
# are missing; and those named as arguments. liburing is optional (I/O falls back to threads) but wanted.
set -euo pipefail

packages=()
need() { # need PACKAGE TEST...
  local package=$1
  shift
  "$@" > /dev/null 2>&1 || packages+=("$package")
}
header() { echo "#include <$1>" | g++ -E -x c++ - ; }

need g++ which g++
need cmake which cmake
need ninja-build which ninja
need fio which fio
need e2fsprogs which mkfs.ext4
need liburing-dev header liburing.h
need doctest-dev header doctest/doctest.h
need libgloo-dev header gloo/algorithm.h
need iproute2 which ip
need python3-venv python3 -c 'import venv, ensurepip'
if ! python3 -c 'import sysconfig, os; assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2> /dev/null; then
  packages+=(python3-dev)
fi

for package in "$@"; do
  dpkg -s "$package" > /dev/null 2>&1 || packages+=("$package")
done

[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
  echo "installing ${packages[*]}" >&2
  if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null; then
    exit 0
  fi
fi
echo "missing system packages: ${packages[*]}; install them, then run this again" >&2
# Without these all still builds: slower I/O, no benchmark against fio, no test on a small disk, between hosts or with clang.
for package in "${packages[@]}"; do
  case $package in liburing-dev | fio | e2fsprogs | clang | pkg-config | libgloo-dev | iproute2 | python3-venv) ;; *) exit 1 ;; esac
done
