# `make demo`, `make serve` and `make test` need Python 3.11+, pip and make, nothing else. All keep their
# environment in .venv, made anew only when requirements.lock or pyproject.toml change; the tools of
# `make test` come with the first command that needs them. torch is its CPU build unless TORCH=cuda.
# Where there is a C++ compiler the kernels in headstart/native are built too, anew when they change.

MODERN := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
            $$p -c '$(MODERN)' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
# `make demo TORCH=cuda` installs PyPI's build of torch, which on Linux brings CUDA.
TORCH := cpu
INSTALLED := .venv/.installed$(if $(filter cuda,$(TORCH)),-with-cuda)
# Another one where there is no compiler, so that headstart is installed again once there is.
READY := .venv/.ready$(if $(shell command -v $${CXX:-c++}),,-without-kernels)
TOOLS := .venv/.tools
CODE := headstart tests examples setup.py $(wildcard bench tools recipes docs/figures_src)
TYPED := headstart $(wildcard bench tools recipes docs/figures_src)
PIP := $(BIN)/python -m pip --disable-pip-version-check install
LOCKED := --constraint requirements.lock
PINNED_TORCH = "$$(grep '^torch==' requirements.lock)"
CPU_TORCH := --index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 20 --no-deps

# The tests start a hundred processes: what one has compiled, the others need not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test lint types unit unit-portable unit-compiled beside \
  compiled emulate sanitize figures bench curves clean

help:
	@echo "make demo    two questions about one long document, the second from the cache"
	@echo "make serve   the embedded model behind OpenAI's API, and a page that shows its cache"
	@echo "make test    style, types, then all tests"
	@echo "make lint | types | unit | unit-portable | unit-compiled    one part of make test"
	@echo "make compiled the cache's tests, and those of what uses it, over headstart.cache compiled"
	@echo "make emulate the kernels' tests on a CPU without AVX-512 (minutes; GCC on Linux)"
	@echo "make sanitize the same over a build that watches memory"
	@echo "make figures draw the figures of the docs anew"
	@echo "make bench   the manager, the engine, cached prefixes, adapters, look-alikes, four loads, the router"
	@echo "make curves  measure the curves of docs/performance.md anew, then draw them (minutes)"
	@echo "make ... TORCH=cuda    install torch with CUDA (5.5 GB) instead of its CPU build"
	@echo "make clean   remove .venv and every cache that the tools left"

demo: $(READY)
	@$(BIN)/headstart demo

serve: $(READY)
	@$(BIN)/headstart serve

# Types, and the tests without kernels and with the cache compiled, beside all the others: these
# leave a core idle now and then.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 unit beside

beside: $(TOOLS)
	@mkdir -p build
	@if $(MAKE) --no-print-directory types unit-portable unit-compiled >build/beside.log 2>&1; \
	  then cat build/beside.log; else cat build/beside.log; exit 1; fi

lint: $(TOOLS)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(TOOLS)
	$(BIN)/mypy $(TYPED)

# One process for each core; a file's tests stay in one, with what they share. In the order of the
# folders: files with few tests, which would else come last, are among the longest.
SPREAD := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
unit: $(TOOLS)
	$(BIN)/python -m pytest $(SPREAD)

# What must be right on every x86 CPU, once more without compiled kernels and with AVX2 alone. In one
# process: beside all the others a second one is no quicker, and imports everything once more.
ANSWERS := tests/models/test_built_in.py::test
PORTABLE := "$(ANSWERS)_answers_are_right_cold_and_warm[bfloat16]" \
            $(ANSWERS)_a_chat_about_one_document \
            $(ANSWERS)_other_documents_and_questions \
            tests/cli/test_main.py::test_demo_answers_what_the_table_says \
            tests/attention/test_torch_ops.py \
            "tests/engine/test_paths.py::test_answers_are_those_of_transformers[llama-plain-bf16-torch]" \
            tests/engine/test_engine.py tests/native
unit-portable: $(TOOLS)
	HEADSTART_NATIVE=0 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(BIN)/python -m pytest $(PORTABLE)

# What some wheels have: half a minute to compile, and the cache's own tests.
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
	@echo "Installing into .venv what headstart needs: $(if $(filter cuda,$(TORCH)),5.5,1.2) GB, a few minutes"
	$(PYTHON) -m venv .venv
ifeq ($(TORCH),cuda)
	$(BIN)/python -m pip uninstall --quiet --yes torch
else
	@$(PIP) $(CPU_TORCH) $(PINNED_TORCH) || \
	  echo "PyTorch's CPU builds cannot be reached. Installing PyPI's build: up to 4.7 GB, which runs on CPUs too"
endif
	$(PIP) $(LOCKED) $(PINNED_TORCH) setuptools
	@touch $@

# As an entry of sys.path: setuptools' other way, a finder, comes after all entries, so that in the
# folder above a clone the clone itself, as a namespace package, would hide the package.
$(READY): Makefile $(INSTALLED) $(wildcard headstart/native/*.cpp headstart/native/*.h headstart/native/*/*.cpp headstart/native/*/*.h)
	@echo "Installing headstart, and compiling its kernels if there is a compiler: about a minute"
	$(PIP) --quiet $(LOCKED) --no-build-isolation --config-settings editable_mode=compat \
	  --editable '.[serve,structured,vision,gguf]'
	@touch $@

$(TOOLS): $(INSTALLED) | $(READY)
	@echo "Installing the tools of make test: 0.6 GB"
	$(PIP) --quiet --requirement requirements.lock
	@touch $@
