# `make demo`, `make serve` and `make test` need only Python 3.11+, pip and make. They share the
# environment .venv, which is installed again when requirements.lock or pyproject.toml change. The
# first command that needs the test tools installs them. torch is its CPU build unless TORCH=cuda.
# With a C++ compiler the kernels in headstart/native are built too, again when they change.

MODERN := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
            $$p -c '$(MODERN)' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
# `make demo TORCH=cuda` installs PyPI's build of torch, which on Linux brings CUDA.
TORCH := cpu
INSTALLED := .venv/.installed$(if $(filter cuda,$(TORCH)),-with-cuda)
# Another file without a compiler, so that headstart is installed again once there is one.
READY := .venv/.ready$(if $(shell command -v $${CXX:-c++}),,-without-kernels)
TOOLS := .venv/.tools
CODE := headstart tests examples setup.py $(wildcard bench tools recipes docs/figures_src)
TYPED := headstart $(wildcard bench tools recipes docs/figures_src)
PIP := $(BIN)/python -m pip --disable-pip-version-check install
LOCKED := --constraint requirements.lock
PINNED_TORCH = "$$(grep '^torch==' requirements.lock)"
CPU_TORCH := --index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 20 --no-deps

# The tests start a hundred processes, which share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test lint types unit unit-portable unit-compiled alongside \
  compiled emulate sanitize figures bench curves clean

help:
	@echo "make demo    three questions about one long document, two of them from the cache"
	@echo "make serve   the embedded model behind OpenAI's API, and a page that shows its cache"
	@echo "make test    style, types, then all tests"
	@echo "make lint | types | unit | unit-portable | unit-compiled    one part of make test"
	@echo "make compiled the tests of the cache and its users, with headstart.cache compiled"
	@echo "make emulate the kernels' tests on a CPU without AVX-512 (minutes; GCC on Linux)"
	@echo "make sanitize the same, with a build that checks memory accesses"
	@echo "make figures draw the figures of the docs"
	@echo "make bench   the manager, the engine, cached prefixes, adapters, look-alikes, four loads, the router"
	@echo "make curves  measure the curves of docs/performance.md, then draw them (minutes)"
	@echo "make ... TORCH=cuda    install torch with CUDA (5.5 GB) instead of its CPU build"
	@echo "make clean   remove .venv, builds and the caches of tools"

demo: $(READY)
	@$(BIN)/headstart demo

serve: $(READY)
	@$(BIN)/headstart serve

# mypy, the tests without kernels and those of the compiled cache run in parallel with all other
# tests, which leave a core idle at times.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 unit alongside

alongside: $(TOOLS)
	@mkdir -p build
	@if $(MAKE) --no-print-directory types unit-portable unit-compiled >build/alongside.log 2>&1; \
	  then cat build/alongside.log; else cat build/alongside.log; exit 1; fi

lint: $(TOOLS)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(TOOLS)
	$(BIN)/mypy $(TYPED)

# One process per core; the tests of a file stay in one process, with their fixtures. Files run in the
# order of the folders: files with few tests, which would come last otherwise, are among the longest.
SPREAD := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
unit: $(TOOLS)
	$(BIN)/python -m pytest $(SPREAD)

# Answers that must be right on every x86 CPU, without compiled kernels and with AVX2 only. In one
# process: a second process would be no faster here, and would import everything again.
ANSWERS := tests/models/test_built_in.py::test
PORTABLE := "$(ANSWERS)_answers_are_right_cold_and_warm[bfloat16]" \
            $(ANSWERS)_a_chat_about_one_document \
            $(ANSWERS)_other_documents_and_questions \
            tests/cli/test_main.py::test_demo_answers_match_the_table \
            tests/attention/test_torch_ops.py \
            "tests/engine/test_paths.py::test_answers_are_those_of_transformers[llama-plain-bf16-torch]" \
            tests/engine/test_engine.py tests/native
unit-portable: $(TOOLS)
	HEADSTART_NATIVE=0 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(BIN)/python -m pytest $(PORTABLE)

# The compiled cache of some wheels: half a minute to compile, then the cache's tests.
unit-compiled: $(TOOLS)
	$(BIN)/python tools/compiled.py tests/cache

compiled: $(TOOLS)
	$(BIN)/python tools/compiled.py

emulate: $(TOOLS)
	$(BIN)/python tools/emulate.py

sanitize: $(TOOLS)
	$(BIN)/python tools/emulate.py --sanitize

figures: $(TOOLS)
	$(BIN)/python docs/figures_src/figures.py

bench: $(TOOLS)
	$(BIN)/python bench/manager/manager.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/curves.py
	$(BIN)/python bench/adapters.py
	$(BIN)/python bench/similar_images.py
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/cluster/router.py

curves: $(TOOLS)
	$(BIN)/python bench/curves.py --shape qwen2.5-0.5b --save docs/performance.json
	$(BIN)/python docs/figures_src/figures.py

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f headstart/native/_kernels.*
	find headstart tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "headstart needs Python 3.11 or newer: make PYTHON=..."; exit 1; }
	@test "$(TORCH)" = cpu -o "$(TORCH)" = cuda || { echo "TORCH is $(TORCH); allowed: cpu, cuda"; exit 1; }
	@echo "Installing the dependencies of headstart into .venv: $(if $(filter cuda,$(TORCH)),5.5,1.2) GB, a few minutes"
	$(PYTHON) -m venv .venv
ifeq ($(TORCH),cuda)
	$(BIN)/python -m pip uninstall --quiet --yes torch
else
	@$(PIP) $(CPU_TORCH) $(PINNED_TORCH) || \
	  echo "PyTorch's CPU builds cannot be reached. Installing PyPI's build: up to 4.7 GB, runs on CPUs too"
endif
	$(PIP) $(LOCKED) $(PINNED_TORCH) setuptools
	@touch $@

# editable_mode=compat adds an entry to sys.path. The default, a finder, comes after all entries, so
# that in the folder above a clone the clone itself, as a namespace package, would hide the package.
$(READY): Makefile $(INSTALLED) $(wildcard headstart/native/*.cpp headstart/native/*.h headstart/native/*/*.cpp headstart/native/*/*.h)
	@echo "Installing headstart, and compiling its kernels if there is a compiler: about a minute"
	$(PIP) --quiet $(LOCKED) --no-build-isolation --config-settings editable_mode=compat \
	  --editable '.[serve,structured,vision,gguf]'
	@touch $@

$(TOOLS): $(INSTALLED) | $(READY)
	@echo "Installing the tools of make test: 0.6 GB"
	$(PIP) --quiet --requirement requirements.lock
	@touch $@
