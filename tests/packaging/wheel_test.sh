#!/usr/bin/env bash
# wheel_test.sh PYTHON FOLDER [--write]: builds the wheel into FOLDER as `pip install .` does,
# installs it with numpy and nothing else into a new virtual environment, and tests it there.
# QATTN_CUDA=ON in the environment puts libqattn_cuda into it. --write: its size and the time of its
# import become bench/results/wheel.json (wheel-cuda.json with that library), from a quiet machine;
# `bench/bench.py render` then puts them on the page.
set -euo pipefail
python=$1
write=${3:-}
if [[ -n "$write" && "$write" != --write ]]; then
  echo "wheel_test.sh: $write is not --write" >&2
  exit 2
fi
source=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$2"
folder=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

rm -f "$folder"/qattn-*.whl
"$python" -m venv "$work/build"  # pip of CPython 3.10 does not know -C
"$work/build/bin/python" -m pip install -q --disable-pip-version-check --upgrade pip
"$work/build/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$folder" \
  -C cmake.define.QATTN_CUDA="${QATTN_CUDA:-OFF}" "$source"
wheel=$(echo "$folder"/qattn-*.whl)
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q --disable-pip-version-check "$wheel"
record=()
if [[ -n "$write" ]]; then
  name=wheel
  [[ "${QATTN_CUDA:-OFF}" == ON ]] && name=wheel-cuda
  record=(--write "$source/bench/results/$name.json" --wheel "$wheel"
          --commit "$(git -C "$source" describe --always --dirty)")
fi
cd "$work"
"$work/venv/bin/python" "$source/tests/packaging/check_wheel.py" "${record[@]}"
echo "$(basename "$wheel"): $(($(stat -c %s "$wheel") / 1024)) KiB"
