# Two commands matter: `make up` serves the bundled model, `make test` runs what CI runs.
# venv + pip and not uv: the CPU build of torch may come from a local find-links folder, which uv does not see.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# By files, in their order: what a file shares among its tests, a mesh or a model, is then started once and not twice.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup up test test-all soak coverage lint format bench bench-peers clean

# An editable installation does not look whether what it has compiled is still what the sources say.
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
	$(BIN)/python -m pytest $(IN_TWO) -m "not slow and not soak and not gpu and not containers" $(ARGS)

test-all: $(DEV_STAMP)
	$(BIN)/python -m pytest $(IN_TWO) -m "not soak and not gpu" $(ARGS)

# Storms of kills, for ten minutes and for five; SOAK_SECONDS and SOAK_SEED set another length and other victims.
soak: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak -s $(ARGS)

# Not in CI: what CI runs, in turn and under measurement, half an hour on two cores. Floors: tools/coverage_floor.py.
coverage: $(DEV_STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow and not soak and not gpu and not containers" $(ARGS)
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

# BENCH_PEERS is a folder with `compare`, which interleaves this server with others (see docs/benchmarks.md).
bench-peers: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.peers "$(BENCH_PEERS)" $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
