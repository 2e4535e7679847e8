# Everything from a fresh Debian 12 as root: `make demo`, `make test`. Each sets up what it needs:
# system packages by apt, Python packages into .venv. A second run only rebuilds what changed.
SHELL := /bin/bash
export OMP_WAIT_POLICY ?= passive
BUILD := build
PY := .venv/bin/python
JOBS ?= $(shell nproc)
APT := g++ cmake pkg-config ninja-build python3-dev python3-venv libgtest-dev libfmt-dev \
       libcli11-dev nlohmann-json3-dev libboost-context-dev g++-aarch64-linux-gnu qemu-user \
       clang libclang-rt-dev libomp-dev

.PHONY: all setup build demo test sanitize tsan fuzz arm wheel gpu-build gpu-test gpu-sanitize \
        gpu-bench model format clean
all: build

$(BUILD)/.apt: Makefile
	@mkdir -p $(BUILD)
	@missing=""; for p in $(APT); do \
	  dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@touch $@

$(BUILD)/.python: python/requirements-dev.txt
	@mkdir -p $(BUILD)
	python3 -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -r python/requirements-dev.txt
	@touch $@

setup: $(BUILD)/.apt
	@$(MAKE) --no-print-directory $(BUILD)/.python

build: setup
	cmake --preset release -DPython_EXECUTABLE=$(CURDIR)/$(PY) >$(BUILD)/configure.log || \
	  { cat $(BUILD)/configure.log; exit 1; }
	cmake --build $(BUILD) -j $(JOBS)

# The table on the terminal, the plots in report.html.
demo: build
	PYTHONPATH=$(BUILD)/python $(PY) tools/capture/embed_minilm.py -o $(BUILD)/embeddings.json
	$(BUILD)/bin/qattn demo --report report.html --embeddings $(BUILD)/embeddings.json

test: build sanitize tsan fuzz arm wheel
	ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)
	QATTN_CLI=$(CURDIR)/$(BUILD)/bin/qattn QATTN_LIBRARY=$(CURDIR)/$(BUILD)/src/libqattn.a \
	  QATTN_FORMATS_DUMP=$(CURDIR)/$(BUILD)/bin/formats_dump \
	  QATTN_BENCH_LIBRARY=$(CURDIR)/$(BUILD)/tests/emulated/libattention_bench_emulated.so \
	  QATTN_FAKE_CUDA=$(CURDIR)/$(BUILD)/tests/validation/libqattn_fake_cuda.so \
	  QATTN_EMULATED_CUDA=$(CURDIR)/$(BUILD)/tests/kvcache_gpu/libqattn_emulated_cuda.so \
	  PYTHONPATH=$(BUILD)/python $(PY) -m pytest -q -p no:cacheprovider tests

# Everything in C++ under AddressSanitizer and UndefinedBehaviorSanitizer (conformance: a sample).
sanitize: setup
	cmake --preset sanitize >$(BUILD)/configure-sanitize.log || \
	  { cat $(BUILD)/configure-sanitize.log; exit 1; }
	cmake --build $(BUILD)/sanitize -j $(JOBS)
	ctest --test-dir $(BUILD)/sanitize --output-on-failure -j $(JOBS)

# Concurrent calls under ThreadSanitizer: the library and that one program.
tsan: setup
	cmake --preset tsan >$(BUILD)/configure-tsan.log || { cat $(BUILD)/configure-tsan.log; exit 1; }
	cmake --build $(BUILD)/tsan -j $(JOBS) --target thread_test
	ctest --test-dir $(BUILD)/tsan --output-on-failure --no-tests=error -R '^hardening[.]Threads$$'

# Coverage-guided, by libFuzzer: the validator and both file readers, for ten seconds each. In the
# other builds a driver without coverage runs the same targets.
FUZZ := fuzz_seeds fuzz_validator fuzz_npy fuzz_safetensors
fuzz: setup
	cmake --preset fuzz >$(BUILD)/configure-fuzz.log || { cat $(BUILD)/configure-fuzz.log; exit 1; }
	cmake --build $(BUILD)/fuzz -j $(JOBS) --target $(FUZZ)
	ctest --test-dir $(BUILD)/fuzz --output-on-failure --no-tests=error -R '^fuzz[.]' -j $(JOBS)

# The wheel in $(BUILD)/wheel, tested in an environment that has numpy and nothing else, within the
# bound on its import. Its size and import time as a record: make wheel WHEEL=--write
wheel: setup
	tests/packaging/wheel_test.sh $(PY) $(BUILD)/wheel $(WHEEL)

# The NEON units, cross-compiled and run under qemu-user.
arm: setup
	cmake --preset arm >$(BUILD)/configure-arm.log || { cat $(BUILD)/configure-arm.log; exit 1; }
	cmake --build $(BUILD)/arm -j $(JOBS)
	ctest --test-dir $(BUILD)/arm --output-on-failure -j $(JOBS)

# On a machine with an NVIDIA GPU, which may have no network: needs nvcc, cmake, ninja and a python3
# with torch, numpy, nanobind and pytest. Only the present GPU's machine code is built.
GPU_BUILD := $(BUILD)/gpu
GPU_ARCH ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | \
              sed -E 's/[. ]//g; s/^(9|1[0-9])([0-9])$$/\1\2a/')
gpu-build:
	@test -n "$(GPU_ARCH)" || { echo "no NVIDIA GPU here"; exit 1; }
	@mkdir -p $(GPU_BUILD)
	cmake -G Ninja -S . -B $(GPU_BUILD) -DCMAKE_BUILD_TYPE=Release -DQATTN_TESTS=OFF -DQATTN_CLI=OFF \
	  -DQATTN_INSTALL=OFF -DQATTN_PYTHON=ON -DQATTN_CUDA=ON -DQATTN_GPU_TESTS=ON \
	  -DQATTN_CUDA_ARCHITECTURES=$(GPU_ARCH) -DPython_EXECUTABLE=$$(command -v python3) \
	  >$(GPU_BUILD)/configure.log || \
	  { cat $(GPU_BUILD)/configure.log; exit 1; }
	cmake --build $(GPU_BUILD) -j $(JOBS)

# ISA_EXPECTED names what the emulator's isa_conformance_emulated wrote on any machine (tests/isa).
GPU_LIBRARY := QATTN_CUDA_LIBRARY=$(CURDIR)/$(GPU_BUILD)/python/qattn/libqattn_cuda.so
gpu-test: gpu-build
	if [ -n "$(ISA_EXPECTED)" ]; then \
	  $(GPU_BUILD)/bin/conformance_gpu $(ISA_EXPECTED) $(GPU_BUILD)/isa.json; fi
	$(GPU_LIBRARY) $(GPU_BUILD)/bin/sanitize_kernels
	$(GPU_LIBRARY) $(GPU_BUILD)/bin/coded_on_gpu
	$(GPU_LIBRARY) $(GPU_BUILD)/bin/kv_cache_on_gpu
	PYTHONPATH=$(GPU_BUILD)/python python3 -m pytest -q -p no:cacheprovider $(GPU_PYTEST) tests/gpu

# Every kernel under the four tools of compute-sanitizer; racecheck is the slow one. What the host
# copies is not checked: its test of a cache looks at pages that nobody wrote, too.
GPU_TOOLS ?= memcheck synccheck initcheck racecheck
gpu-sanitize: gpu-build
	for tool in $(GPU_TOOLS); do \
	  $(GPU_LIBRARY) compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(GPU_BUILD)/bin/sanitize_kernels --exact --run-only || exit 1; \
	  $(GPU_LIBRARY) compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(GPU_BUILD)/bin/coded_on_gpu --exact --run-only || exit 1; \
	  $(GPU_LIBRARY) compute-sanitizer --tool $$tool --error-exitcode 1 \
	    --check-api-memory-access no \
	    $(GPU_BUILD)/bin/kv_cache_on_gpu --no-times 50 || exit 1; \
	done

# What to measure is in GPU_BENCH: make gpu-bench GPU_BENCH="--shapes mha --recipes int8_full"
gpu-bench: gpu-build
	cmake --build $(GPU_BUILD) -j $(JOBS) --target attention_bench
	python3 bench/bench.py run --library $(GPU_BUILD)/cuda/libattention_bench.so \
	  -o $(GPU_BUILD)/bench.json $(GPU_BENCH)

# Bounds on the GPU kernels' time, from the emulator: after a change of a kernel.
model: build
	$(BUILD)/bin/qattn model --json >bench/results/model-h200.json
	$(PY) bench/bench.py render

format:
	clang-format -i $$(git ls-files '*.cpp' '*.hpp' '*.h' '*.inl' '*.cu' '*.cuh')

clean:
	rm -rf $(BUILD) report.html
