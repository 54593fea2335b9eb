# make chat    set up what the app needs and open it
# make test    set everything up and run the tests but those of test-full
# make unit    only the quick tests, for the daily loop
# make check   style, import contracts and types
# make test-full   the tests that are slow and seldom fail: set-up, wheel, demo model, kernels
# make setup   leaves the program at .venv/bin/cpuchat
# make wheels  builds the engine's wheel and cpuchat's into dist/, for machines without a compiler
# make constraints   renews the versions in constraints.txt

SHELL := $(or $(shell command -v bash),$(error cpuchat's scripts need bash (Alpine: apk add bash)))
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3 || command -v python3.11 || echo python3)
# The engine compiles with every core; its build flags are in pyproject.toml.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export UV_PYTHON_DOWNLOADS ?= never
# The tests start Python some hundred times; without kept bytecode each start compiles everything.
unexport PYTHONDONTWRITEBYTECODE

TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 3 : 6)))

UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
# Written by .ci/setup. The tests' tools are 300 MB that nobody waits for who opens the app.
APP := .venv/.ready
TESTS := .venv/.ready-for-tests

.PHONY: help chat test test-full setup check unit wheels constraints clean

help:
	@sed -n 's/^# make/make/p' Makefile

chat: setup
	@exec .venv/bin/cpuchat

setup: $(APP)

# The engine of a wheel in dist/, or where CPUCHAT_WHEELS points, is installed in place of compiling it.
$(APP) $(TESTS): pyproject.toml constraints.txt $(wildcard dist/llama_cpp_python-*.whl) | $(UV)

$(APP):
	@.ci/setup "$(UV)"

$(TESTS):
	@.ci/setup "$(UV)" tests

wheels: | $(UV)
	@.ci/wheels "$(UV)"

# The newest versions that pyproject.toml allows, for every platform and Python; `make setup` installs exactly these.
constraints: | $(UV)
	@"$(UV)" pip compile --quiet --upgrade --universal --no-annotate --custom-compile-command "make constraints" \
		--group dev pyproject.toml -o constraints.txt

.tools/bin/uv:
	@.ci/uv "$(PYTHON)"

# Node collects garbage less often: that takes a tenth of the time.
check: $(TESTS)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/lint-imports
	@NODE_OPTIONS=--max-semi-space-size=64 .venv/bin/pyright --warnings

# Packages whose tests need no worker, terminal or engine.
UNIT := $(addprefix tests/,base chats config costs engine/text hardware models present protocol speculation telemetry \
	tui/markdown tui/widgets tune)

unit: $(TESTS)
	@.venv/bin/python -m pytest $(BY_FILE) -n auto --maxprocesses 4 -m "not slow" $(UNIT)

# Each process takes one file after the other, whose tests share models and workers. Tests wait for other processes half
# of the time, so there are more of them than cores, up to six. The files with the longest tests come first. The
# package is compiled once before, and not by each process.
test: $(TESTS)
	@.venv/bin/python -m compileall -q cpuchat
	@.venv/bin/python -m pytest $(BY_FILE) -n $(TEST_PROCESSES) -m "not full"

test-full: $(TESTS)
	@.venv/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m full $$(grep -rl --include='*.py' 'mark\.full' tests)

# The share of tests that are done is not known: only files are counted.
BY_FILE := -p tests.support.by_file --dist load --maxschedchunk 1 -o console_output_style=classic

clean:
	rm -rf .venv .tools
