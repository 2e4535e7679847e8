# Everything from a fresh Debian 12 as root: `make demo`, `make test`. Each sets up what it needs:
# system packages by apt, Python packages into .venv. A second run only rebuilds what changed.
SHELL := /bin/bash
export OMP_WAIT_POLICY ?= passive
BUILD := build
PY := .venv/bin/python
JOBS ?= $(shell nproc)
APT := g++ cmake pkg-config ninja-build python3-dev python3-venv libgtest-dev libfmt-dev libcli11-dev \
       nlohmann-json3-dev g++-aarch64-linux-gnu qemu-user

.PHONY: all setup build demo test sanitize arm wheel format clean
all: build

$(BUILD)/.apt: Makefile
	@mkdir -p $(BUILD)
	@missing=""; for p in $(APT); do \
	  dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
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

test: build sanitize arm
	ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)
	QATTN_CLI=$(CURDIR)/$(BUILD)/bin/qattn QATTN_LIBRARY=$(CURDIR)/$(BUILD)/src/libqattn.a \
	  QATTN_FORMATS_DUMP=$(CURDIR)/$(BUILD)/bin/formats_dump \
	  PYTHONPATH=$(BUILD)/python $(PY) -m pytest -q -p no:cacheprovider tests

# Everything in C++ under AddressSanitizer and UndefinedBehaviorSanitizer (conformance: a sample).
sanitize: setup
	cmake --preset sanitize >$(BUILD)/configure-sanitize.log || \
	  { cat $(BUILD)/configure-sanitize.log; exit 1; }
	cmake --build $(BUILD)/sanitize -j $(JOBS)
	ctest --test-dir $(BUILD)/sanitize --output-on-failure -j $(JOBS)

# The wheel in $(BUILD)/wheel, tested in an environment that has numpy and nothing else.
wheel: setup
	tests/packaging/wheel_test.sh $(PY) $(BUILD)/wheel

# The NEON units, cross-compiled and run under qemu-user.
arm: setup
	cmake --preset arm >$(BUILD)/configure-arm.log || { cat $(BUILD)/configure-arm.log; exit 1; }
	cmake --build $(BUILD)/arm -j $(JOBS)
	ctest --test-dir $(BUILD)/arm --output-on-failure -j $(JOBS)

format:
	clang-format -i $$(git ls-files '*.cpp' '*.hpp' '*.h' '*.inl')

clean:
	rm -rf $(BUILD) report.html
