#!/usr/bin/env bash
# install_test.sh static|shared SOURCE BUILD: installs the library of that kind from BUILD (built
# first where it is none yet) into a temporary prefix, moves the prefix, and builds and runs an
# outside project with it, through find_package and through pkg-config. The program comes along
# where the build has it.
set -euo pipefail
kind=$1 source=$2 build=$3
cmake=${CMAKE:-cmake} cc=${CC:-cc} cxx=${CXX:-c++}
work=$(realpath "$(mktemp -d)")
trap 'rm -rf "$work"' EXIT

quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }; }

if [[ ! -e $build/qattn-config.cmake || -e $build/packaging-own ]]; then
  mkdir -p "$build" && touch "$build/packaging-own"
  quietly "$cmake" -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Debug -DQATTN_TESTS=OFF \
    -DQATTN_CLI=OFF -DQATTN_CUDA=OFF -DBUILD_SHARED_LIBS="$([[ $kind == shared ]] && echo ON || echo OFF)"
  quietly "$cmake" --build "$build" -j "$(nproc)"
fi
quietly "$cmake" --install "$build" --prefix "$work/first" --component library
mv "$work/first" "$work/prefix"
prefix=$work/prefix
libdir=$(dirname "$(find "$prefix" -name 'libqattn.*' | head -1)")
case $kind in
  static) test -e "$libdir/libqattn.a" ;;
  shared) test -e "$libdir/libqattn.so" ;;
esac
test -e "$prefix/include/qattn/formats.def"
if grep -rqF -e "$source" -e "$build" "$libdir/cmake" "$libdir/pkgconfig"; then
  echo "the installed package names the source or build directory"
  exit 1
fi

# The program, where this build has one, reads the demo's tensors that were installed with it.
if [[ -e $build/bin/qattn ]]; then
  quietly "$cmake" --install "$build" --prefix "$prefix" --component program
  "$prefix/bin/qattn" info >/dev/null
  : >"$prefix/share/qattn/minilm_qkv.safetensors"
  if "$prefix/bin/qattn" demo --report "$work/report.html" 2>"$work/log"; then
    echo "the installed demo took other tensors than its own"
    exit 1
  fi
  grep -qF "$prefix/share/qattn/minilm_qkv.safetensors" "$work/log"
fi

version=$(sed -n 's/^Version: //p' "$libdir/pkgconfig/qattn.pc")
grep -q "^project(qattn VERSION $version " "$source/CMakeLists.txt"
quietly "$cmake" -S "$source/tests/packaging/consumer" -B "$work/consumer" \
  -DCMAKE_PREFIX_PATH="$prefix" -DQATTN_VERSION="$version"
quietly "$cmake" --build "$work/consumer"
"$work/consumer/consumer_c"
"$work/consumer/consumer_cpp"

# The examples are projects outside of qattn's, too.
quietly "$cmake" -S "$source/examples/cpp" -B "$work/examples" -DCMAKE_PREFIX_PATH="$prefix"
quietly "$cmake" --build "$work/examples"
for example in attention plan_once score_function; do "$work/examples/$example"; done

if command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH=$libdir/pkgconfig
  read -ra flags <<<"$(pkg-config --cflags qattn)"
  read -ra libs <<<"$(pkg-config --libs qattn)"
  sources=$source/tests/packaging/consumer
  "$cc" "${flags[@]}" "$sources/consumer.c" -o "$work/c" "${libs[@]}"
  "$cxx" -std=c++20 "${flags[@]}" "$sources/consumer.cpp" -o "$work/cpp" "${libs[@]}"
  "$cc" "${flags[@]}" "$source/examples/c/attention.c" -o "$work/example" "${libs[@]}" -lm
  LD_LIBRARY_PATH=$libdir "$work/example"
  LD_LIBRARY_PATH=$libdir "$work/c"
  LD_LIBRARY_PATH=$libdir "$work/cpp"
else
  echo "pkg-config is not installed: its file was not tried"
fi
