# Everything from a fresh Debian 12 as root: `make demo`, `make test`. Each installs what it needs:
# system packages by apt, Python packages into .venv. A second run only rebuilds what changed.
#
#   make demo       the program and the Python extension, and every recipe on a real model's tensors
#   make check      a developer's loop: what a change of a CPU file can break
#   make test       what CI runs
#   make test-all   everything: all sanitizers, all GPU targets, full matrices, fuzzing, Arm
#   make docs       the site of the pages, with the interfaces' reference, in build/site
#
# The three tiers run the targets below as phases (tools/tier.py) and end with each phase's time.
# RECORD=FILE keeps the times as JSON; RESUME=1 goes on after what passed at this commit, and
# PHASES=A,B runs these alone.
# CONTRIBUTING.md says what is in which tier.
SHELL := /bin/bash
export OMP_WAIT_POLICY ?= passive
BUILD := build
PY := .venv/bin/python
JOBS ?= $(shell nproc)

.PHONY: all demo check test test-all docs setup-demo setup setup-all configure build ctest-check \
        ctest ctest-all ctest-full pytest-check pytest sanitize sanitize-all tsan fuzz arm wheel \
        wheels cuda cuda-all gpu-build gpu-test gpu-sanitize gpu-bench model format clean
all: build

# ---- What each target needs of the system ------------------------------------------------------

APT_demo := g++ cmake pkg-config ninja-build python3-dev python3-venv libgtest-dev libfmt-dev \
            libcli11-dev nlohmann-json3-dev libboost-context-dev
APT_test := $(APT_demo) qemu-user
APT_all := $(APT_test) g++-aarch64-linux-gnu clang libclang-rt-dev libomp-dev

$(BUILD)/.apt-%: Makefile
	@mkdir -p $(BUILD)
	@missing=""; for p in $(APT_$*); do \
	  dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@touch $@

# Modules are compiled where they are imported, which few of them are.
PIP := $(PY) -m pip install -q --disable-pip-version-check --no-compile
$(BUILD)/.python-%: python/requirements-%.txt python/requirements-demo.txt
	@mkdir -p $(BUILD)
	@test -x $(PY) || python3 -m venv .venv
	@echo "installing Python packages into .venv"
	@$(PIP) -r $<
	@if [ -f python/requirements-$*-no-deps.txt ]; then \
	  $(PIP) --no-deps -r python/requirements-$*-no-deps.txt; \
	fi
	@touch $@
$(BUILD)/.python-dev: python/requirements-dev-no-deps.txt

setup-demo: $(BUILD)/.apt-demo
	@$(MAKE) --no-print-directory $(BUILD)/.python-demo
setup: $(BUILD)/.apt-test
	@$(MAKE) --no-print-directory $(BUILD)/.python-dev
setup-all: setup $(BUILD)/.apt-all

# ---- The build -----------------------------------------------------------------------------------

# $(call cmake,PRESET,FOLDER,OPTIONS): the configuration; what it says is shown where it fails.
define cmake
@mkdir -p $(2)
@cmake --preset $(1) $(3) >$(2)/configure.log || { cat $(2)/configure.log; exit 1; }
endef

# Where there is a GPU, its kernels are built, for it alone. Other machine code: `make cuda-all`.
GPU_ARCH ?= $(shell command -v nvcc >/dev/null && command -v nvidia-smi >/dev/null && \
              nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | \
              sed -nE 's/[. ]//g; s/^(9|1[0-9])([0-9])$$/\1\2a/; /^[0-9]+a?$$/p')
GPU_OPTIONS = $(if $(GPU_ARCH),-DQATTN_CUDA=ON -DQATTN_CUDA_ARCHITECTURES=$(GPU_ARCH),-DQATTN_CUDA=OFF)

configure: setup
	$(call cmake,release,$(BUILD),-DPython_EXECUTABLE=$(CURDIR)/$(PY) $(GPU_OPTIONS))
build: configure
	cmake --build $(BUILD) -j $(JOBS)

# The library, the program and the extension; the table on the terminal, pictures in report.html.
demo: setup-demo
	$(call cmake,release,$(BUILD),-DPython_EXECUTABLE=$(CURDIR)/$(PY) $(GPU_OPTIONS))
	cmake --build $(BUILD) -j $(JOBS) --target qattn_cli _qattn $(if $(GPU_ARCH),qattn_cuda)
	PYTHONPATH=$(BUILD)/python $(PY) tools/capture/embed_minilm.py -q -o $(BUILD)/embeddings.json
	$(BUILD)/bin/qattn demo --report report.html --embeddings $(BUILD)/embeddings.json

# ---- Tests ---------------------------------------------------------------------------------------

check test test-all:
	@command -v python3 >/dev/null || $(MAKE) --no-print-directory setup
	@python3 tools/tier.py $@ $(if $(PHASES),--phases $(PHASES)) $(if $(RECORD),--record $(RECORD)) \
	  $(if $(RESUME),--resume)

CTEST := ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS)
ctest-check: build
	$(CTEST) -LE slow
ctest: build
	$(CTEST)
# Every emulated kernel and every feature alone under all three schedules.
ctest-all: build
	QATTN_EMULATED_SCHEDULES=all QATTN_KV_SEQUENCES=10000 QATTN_THOROUGH=1 $(CTEST)
# The whole matrices, whose cells take turns with schedules: three times an hour of a core would
# say little more.
ctest-full: build
	$(CTEST) -C all -L full

PYTEST := QATTN_CLI=$(CURDIR)/$(BUILD)/bin/qattn QATTN_LIBRARY=$(CURDIR)/$(BUILD)/src/libqattn.a \
  QATTN_FORMATS_DUMP=$(CURDIR)/$(BUILD)/bin/formats_dump \
  QATTN_BENCH_LIBRARY=$(CURDIR)/$(BUILD)/tests/emulated/libattention_bench_emulated.so \
  QATTN_JUDGE_WORDS=$(CURDIR)/$(BUILD)/tests/isa/libisa_judge_words.so \
  QATTN_FAKE_CUDA=$(CURDIR)/$(BUILD)/tests/validation/libqattn_fake_cuda.so \
  QATTN_EMULATED_CUDA=$(CURDIR)/$(BUILD)/tests/kvcache_gpu/libqattn_emulated_cuda.so \
  PYTHONPATH=$(BUILD)/python $(PY) -m pytest -q -p no:cacheprovider -n $(JOBS) --dist loadgroup \
  --durations 10
# What needs no minute.
pytest-check: build
	$(PYTEST) -m "not slow" tests/python tests/cli tests/docs
pytest: build
	$(PYTEST) tests

# $(call sanitized,PRESET,FOLDER): builds and runs what that preset has.
define sanitized
$(call cmake,$(1),$(2))
cmake --build $(2) -j $(JOBS)
ctest --test-dir $(2) --output-on-failure --no-tests=error -j $(JOBS)
endef

# AddressSanitizer and UndefinedBehaviorSanitizer: a sample that reaches every kernel file, or all.
sanitize: setup
	$(call sanitized,sanitize,$(BUILD)/sanitize)
sanitize-all: setup
	$(call sanitized,sanitize-all,$(BUILD)/sanitize-all)

# Concurrent calls under ThreadSanitizer: the library and that one program.
tsan: setup
	$(call cmake,tsan,$(BUILD)/tsan)
	cmake --build $(BUILD)/tsan -j $(JOBS) --target thread_test
	ctest --test-dir $(BUILD)/tsan --output-on-failure --no-tests=error -R '^hardening[.]Threads$$'

# Coverage-guided, by libFuzzer: the validator and both file readers, for a minute each. In the
# other builds a driver without coverage runs the same targets for seconds.
FUZZ := fuzz_seeds fuzz_validator fuzz_npy fuzz_safetensors
fuzz: setup-all
	$(call cmake,fuzz,$(BUILD)/fuzz)
	cmake --build $(BUILD)/fuzz -j $(JOBS) --target $(FUZZ)
	ctest --test-dir $(BUILD)/fuzz --output-on-failure --no-tests=error -R '^fuzz[.]' -j $(JOBS)

# The NEON units, cross-compiled and run under qemu-user.
arm: setup-all
	$(call cmake,arm,$(BUILD)/arm)
	cmake --build $(BUILD)/arm -j $(JOBS)
	ctest --test-dir $(BUILD)/arm --output-on-failure --no-tests=error -j $(JOBS)

# The wheel in $(BUILD)/wheel, tested in an environment that has numpy and nothing else, within the
# bound on its import. Its size and import time as a record: make wheel WHEEL=--write
wheel: setup
	tests/packaging/wheel_test.sh $(PY) $(BUILD)/wheel $(WHEEL)
# The same with every CPython on the path, of those that pyproject.toml admits.
wheels: setup
	@for python in python3.10 python3.11 python3.12 python3.13 python3.14; do \
	  if $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "wheel for $$($$python --version)"; \
	    tests/packaging/wheel_test.sh "$$(command -v $$python)" $(BUILD)/wheel/$$python || exit 1; \
	  fi; \
	done

# ---- Pages --------------------------------------------------------------------------------------

# Every link is followed, and a warning is an error (with --quiet mkdocs would not count them).
docs: $(BUILD)/.apt-demo
	@$(MAKE) --no-print-directory $(BUILD)/.python-docs
	$(PY) tools/check_pages.py
	$(PY) tools/check_includes.py
	$(PY) tools/site/stage.py $(BUILD)/docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "the site: $(BUILD)/site/index.html"

# ---- GPU code, compiled where nvcc is --------------------------------------------------------------

# $(call machine_code,FOLDER,ARCHITECTURES,DIMENSIONS,QUICK): libqattn_cuda, registers and spills
# compared with the record but for groups that are compiled quickly. No host code is run.
define machine_code
@if ! command -v nvcc >/dev/null; then echo "no nvcc: GPU code is not compiled"; exit 0; fi; \
set -e; mkdir -p $(1); \
cmake -G Ninja -S . -B $(1) -DCMAKE_BUILD_TYPE=Release -DQATTN_TESTS=OFF -DQATTN_CLI=OFF \
  -DQATTN_CUDA=ON -DQATTN_CUDA_ARCHITECTURES="$(2)" -DQATTN_TIME_STEPS=ON \
  -DQATTN_CUDA_DIMENSIONS="$(3)" -DQATTN_CUDA_QUICK="$(4)" \
  -DCMAKE_CUDA_FLAGS_RELEASE="-O0 -DNDEBUG" >$(1)/configure.log || \
  { cat $(1)/configure.log; exit 1; }; \
cmake --build $(1) -j $(JOBS) --target qattn_cuda; \
$(PY) tools/gpu_report.py $(1) --check
endef

# Hopper's target has code of most kernels; those of one head dimension share all their headers with
# the others. What makes codes and what reads KV caches must be accepted.
cuda: setup
	$(call machine_code,$(BUILD)/cuda,90a,128,codes;mixed_kv)
cuda-all: setup
	$(call machine_code,$(BUILD)/cuda-all,80;89;90a;100f;120f,,)

# ---- On a machine with a GPU -----------------------------------------------------------------------

# On a machine with an NVIDIA GPU, which may have no network: needs nvcc, cmake, ninja and a python3
# with torch, numpy, nanobind and pytest. Only the present GPU's machine code is built.
GPU_BUILD := $(BUILD)/gpu
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
# All tools run, whichever of them fail.
gpu-test: gpu-build
	@failed=""; \
	try() { echo "$${@:2}"; env "$${@:2}" || failed="$$failed $$1"; }; \
	if [ -n "$(ISA_EXPECTED)" ]; then \
	  try conformance_gpu $(GPU_BUILD)/bin/conformance_gpu $(ISA_EXPECTED) $(GPU_BUILD)/isa.json; fi; \
	for tool in sanitize_kernels coded_on_gpu kv_cache_on_gpu; do \
	  try $$tool $(GPU_LIBRARY) $(GPU_BUILD)/bin/$$tool; done; \
	try pytest PYTHONPATH=$(GPU_BUILD)/python python3 -m pytest -q -p no:cacheprovider \
	  $(GPU_PYTEST) tests/gpu; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

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
	$(BUILD)/bin/qattn_model --json >bench/results/model-h200.json
	$(BUILD)/bin/qattn_model --json --device 5090,pro6000,4090,a100 \
	  --compiled bench/results/gpu-slots.json >bench/results/model-sm120.json
	$(PY) bench/bench.py render

format:
	clang-format -i $$(git ls-files '*.cpp' '*.hpp' '*.h' '*.inl' '*.cu' '*.cuh' '*.c')

clean:
	rm -rf $(BUILD) report.html
