# `make up` serves the bundled model; `make test` runs the test suite. CI runs `make lint` and `make test`.
# venv + pip instead of uv: the CPU build of torch may come from a local find-links folder, which uv does not see.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# By file, in order: what the tests of a file share (a mesh or a model) is then started once and not twice. Three for two
# cores: tests of processes and sockets wait most of the time (3,090 of them took 187 s with two workers, 141 with three).
BY_FILE := -n 3 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# A mesh is four new interpreters of 300 modules: whoever compiles them each time spends 0.9 s of a core more on each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup up test test-all soak coverage lint format bench bench-peers clean

# An editable installation does not notice that compiled kernels are older than their sources, so make does.
KERNELS := setup.py $(wildcard nodes/worker/ops/native/*.cpp nodes/worker/ops/native/*.h nodes/worker/ops/native/sources.py)

$(STAMP): pyproject.toml constraints.txt $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) -e '.[test,dev]'
	touch $@

setup: $(DEV_STAMP)

up: $(STAMP)
	$(BIN)/meshctl up $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(BY_FILE) -m "not slow and not soak and not gpu and not containers and not real_models" $(ARGS)

# MODELS is a folder of published models (see CONTRIBUTING.md); without it their tests are skipped.
test-all: $(DEV_STAMP)
	TEST_MODELS="$(MODELS)" $(BIN)/python -m pytest $(BY_FILE) -m "not soak and not gpu" $(ARGS)

# Storms of kills, of ten minutes and of five; SOAK_SECONDS and SOAK_SEED set another length and other victims.
soak: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak -s $(ARGS)

# Not in CI: the tests that CI runs, one after the other under coverage, half an hour on two cores. Floors:
# tools/coverage_floor.py.
coverage: $(DEV_STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow and not soak and not gpu and not containers and not real_models" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing
	$(BIN)/coverage json --quiet -o .coverage.json
	$(BIN)/python -m tools.coverage_floor .coverage.json

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# BENCH_PEERS is a folder with `compare`, which measures this server and others alternately (see docs/benchmarks.md).
bench-peers: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.peers "$(BENCH_PEERS)" $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
