#!/usr/bin/env bash
# run.sh BUILD_DIR: uses a built TreeMLA as outsiders do. Everything it makes is in BUILD_DIR/consumer.
#
#   1. the installed shared library, by find_package and by pkg-config, from a prefix that was moved
#   2. the source tree inside another project, as a static library
#   3. that static library installed, by find_package and by pkg-config
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(cd "$here/../.." && pwd)
build=$(cd "$1" && pwd)
work=$build/consumer
: "${CXX:=c++}" "${CC:=cc}"
export CXX CC
if command -v ninja >/dev/null; then export CMAKE_GENERATOR=Ninja; fi
if [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ]; then unset CMAKE_CXX_COMPILER_LAUNCHER; fi
rm -rf "$work/prefix" "$work/prefix-static" "$work/installing"
mkdir -p "$work"

# Quiet unless it fails.
quietly() {
  if ! "$@" >"$work/log" 2>&1; then
    cat "$work/log"
    echo "failed: $*"
    exit 1
  fi
}

run_consumers() {  # run_consumers DIR
  "$1/consumer_c"
  "$1/consumer_cpp"
}

by_cmake() {  # by_cmake NAME CMAKE_OPTIONS...
  local dir=$work/$1
  shift
  quietly cmake -S "$here" -B "$dir" -DCMAKE_BUILD_TYPE=Release "$@"
  quietly cmake --build "$dir"
  run_consumers "$dir"
}

by_pkg_config() {  # by_pkg_config NAME PREFIX [--static]
  local dir=$work/$1 prefix=$2 static=${3:-}
  local pc
  pc=$(find "$prefix" -name treemla.pc)
  export PKG_CONFIG_PATH=${pc%/*}
  local flags
  flags="$(pkg-config --cflags --libs $static treemla) -Wl,-rpath,$(pkg-config --variable=libdir treemla)"
  mkdir -p "$dir"
  # pkg-config's output is words, so unquoted.
  quietly "$CXX" -std=c++20 "$here/main.cpp" -o "$dir/consumer_cpp" $flags
  quietly "$CC" -std=c99 "$here/main.c" -o "$dir/consumer_c" $flags
  run_consumers "$dir"
}

echo "== installed, shared"
quietly cmake --install "$build" --prefix "$work/installing"
mv "$work/installing" "$work/prefix"
by_cmake find_package -DCMAKE_PREFIX_PATH="$work/prefix"
by_pkg_config pkg_config "$work/prefix"
for file in bin/treemla include/treemla/treemla.h share/doc/treemla/LICENSE; do
  [ -e "$work/prefix/$file" ] || { echo "not installed: $file"; exit 1; }
done
"$work/prefix/bin/treemla" --help >/dev/null

# Unoptimised and for one instruction set, without the GPU kernels: it is compiled anew, and here only linking matters.
echo "== inside another project, static"
by_cmake subdirectory -DTREEMLA_SOURCE_DIR="$source" -DTREEMLA_INSTALL=ON -DTREEMLA_CUDA=OFF \
  -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DHWY_COMPILE_ONLY_STATIC"

echo "== installed, static"
quietly cmake --install "$work/subdirectory" --prefix "$work/prefix-static"
[ -n "$(find "$work/prefix-static" -name libtreemla.a)" ] || { echo "not installed: libtreemla.a"; exit 1; }
by_cmake find_package_static -DCMAKE_PREFIX_PATH="$work/prefix-static"
by_pkg_config pkg_config_static "$work/prefix-static" --static
