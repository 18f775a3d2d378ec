#!/usr/bin/env bash
# Builds and runs the programs of tests/outside against an installed zeropage, with g++ and clang++: from a prefix, the
# Python package, pkg-config, and an archive of cpack. Compiles nothing of zeropage itself.
#   tools/test_install.sh BUILD [PYTHON]
# BUILD is a build folder of zeropage. PYTHON has the package and torch; without it, the Python package is not tested.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "$1")
python=${2:-}
outside=$PWD/tests/outside
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

start=$SECONDS
say() { echo "[$((SECONDS - start)) s] $*"; }
quiet() { # quiet COMMAND...: prints the output of a command that fails
  "$@" > "$work/log" 2>&1 || { cat "$work/log" >&2; echo "failed: $*" >&2; return 1; }
}

check() { # check FOLDER: the programs in it find all libraries by themselves, libzeropage first, and libstdc++ before torch's
  local program order
  for program in files train; do
    order=$(readelf -d "$1/$program" | sed -n 's/.*NEEDED.*\[\(libzeropage\|libstdc++\|libtorch\|libc10\).*/\1/p' | head -2 | xargs)
    [ "$order" = "libzeropage libstdc++" ] || { echo "$1/$program loads $order first" >&2; return 1; }
    mkdir -p "$work/disk"
    env -i "$1/$program" "$work/disk" || { echo "$1/$program failed" >&2; return 1; }
  done
}

find_package() { # find_package FOLDER COMPILER OPTION...
  local folder=$work/$1 compiler=$2
  shift 2
  quiet cmake -S "$outside" -B "$folder" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS="-Wall -Wextra -Werror" "$@"
  quiet cmake --build "$folder"
  check "$folder"
}

with_pkg_config() { # with_pkg_config FOLDER COMPILER LIB OBJECT: LIB contains pkgconfig/zeropage.pc
  local folder=$work/$1 compiler=$2 cflags libs
  export PKG_CONFIG_PATH=$3/pkgconfig
  mkdir -p "$folder"
  cflags=$(pkg-config --cflags zeropage)
  libs=$(pkg-config --libs zeropage)
  # The words of both are arguments.
  # shellcheck disable=SC2086
  quiet "$compiler" -O1 -Wall -Wextra -Werror $cflags "$outside/files.cpp" -o "$folder/files" $libs
  # shellcheck disable=SC2086
  quiet "$compiler" "$4" -o "$folder/train" $libs
  check "$folder"
}

say "installing into a prefix"
prefix=$work/prefix
quiet cmake --install "$build" --component development --prefix "$prefix"
say "packing"
generators=TGZ
if command -v dpkg-deb > /dev/null; then generators="DEB;TGZ"; else say "SKIPPED: no dpkg, so no .deb"; fi
quiet cpack --config "$build/CPackConfig.cmake" -G "$generators" -B "$work/packages"
mkdir "$work/archive"
tar -xzf "$work"/packages/*.tar.gz -C "$work/archive" --strip-components=1

for compiler in g++ clang++; do
  if ! command -v "$compiler" > /dev/null; then
    say "SKIPPED: $compiler is not installed"
    continue
  fi
  say "$compiler: find_package(zeropage) in a prefix, Release"
  find_package "$compiler" "$compiler" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
  object=$work/$compiler/CMakeFiles/train.dir/train.cpp.o
  if [ -n "$python" ]; then
    package=$("$python" -c 'import zeropage; print(zeropage.cmake_prefix_path)')
    torch=$("$python" -c 'import torch; print(torch.utils.cmake_prefix_path)')
    say "$compiler: find_package(zeropage) in the Python package"
    find_package "$compiler-package" "$compiler" -DCMAKE_PREFIX_PATH="$package" -DTRAIN="$object"
    for order in before after; do
      say "$compiler: find_package(Torch) $order find_package(zeropage)"
      find_package "$compiler-$order" "$compiler" -DCMAKE_PREFIX_PATH="$torch;$package" -DTRAIN="$object" -DTORCH=$order
    done
  fi
  say "$compiler: an archive in another folder"
  find_package "$compiler-archive" "$compiler" -DCMAKE_PREFIX_PATH="$work/archive" -DTRAIN="$object"
  if command -v pkg-config > /dev/null; then
    say "$compiler: pkg-config"
    with_pkg_config "$compiler-pkg-config" "$compiler" "$work/archive/lib" "$object"
    if [ -n "$python" ]; then
      say "$compiler: pkg-config of the Python package"
      with_pkg_config "$compiler-package-pkg-config" "$compiler" "$(dirname "$package")/../lib" "$object"
    fi
  else
    say "SKIPPED: pkg-config is not installed"
  fi
done
say "all programs ran"
