# One command runner: `make help` lists it. Everything is installed into .venv and built where it is
# missing or older than its sources; nothing else on the machine is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.make
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
PROMPT ?=
export PROMPT
TRACES ?=
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help run test test-rust test-python soak check format bench figures gpu gpu-all wheel clean

help: ## This list
	@echo "Chairlift: make <target>"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  %-13s %s\n", $$1, $$2 }'

run: $(STAMPS)/installed ## Serve several prompts at once on the default model; PROMPT="..." adds yours
	@$(BIN)/chairlift generate --examples -- $${PROMPT:+"$$PROMPT"}

test: test-rust test-python ## All Rust tests, then all Python tests

test-rust: $(STAMPS)/installed
	cargo test --locked --workspace --exclude chairlift-python

test-python: $(STAMPS)/installed
	$(BIN)/python -m pytest

soak: ## Ten million steps of random operations on the scheduler, with every invariant checked
	CHAIRLIFT_SOAK_RUNS=1667 cargo test --locked -p chairlift-core --test engine -- --nocapture invariants

check: $(STAMPS)/installed ## Formatters, clippy, ruff, mypy --strict, stubtest
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/stubtest --mypy-config-file pyproject.toml --ignore-missing-stub chairlift._core

format: $(STAMPS)/installed ## Let the formatters have their way
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMPS)/installed ## Scheduler and simulator benches (criterion) and boundary benches (pytest-benchmark)
	cargo bench --locked -p chairlift-benches
	$(BIN)/python -m pytest benches --benchmark-only

POLICIES = $(BIN)/python benches/policies.py --out docs --seed $(SEED) --experiment
CHAT = --trace "$(TRACES)/azure2023_conv.csv.gz"
BATCH = --batch "$(TRACES)/lengths_sharegpt8k.csv.gz"

# An experiment in which something does not hold says so in its table, and the others go on.
figures: $(STAMPS)/installed ## Tables and pictures of the policies into docs/; TRACES=<folder of traces>
	@test -n "$(TRACES)" || { echo "set TRACES to the folder that holds the traces" >&2; exit 2; }
	-$(POLICIES) head-of-line $(CHAT) --load 0.7
	-$(POLICIES) fairness $(CHAT) --load 1.2
	-$(POLICIES) flood --trace "$(TRACES)/servegen_m-large_300s_sampled.csv.gz" --load 1.5
	-$(POLICIES) priority $(CHAT) $(BATCH) --load 0.3
	-$(POLICIES) overload $(CHAT) --load 1
	-$(POLICIES) queue-time $(CHAT) $(BATCH) --load 1.5
	-$(POLICIES) order $(CHAT) --load 0.95
	-$(POLICIES) memory --trace "$(TRACES)/lengths_bwb.csv.gz" --also "$(TRACES)/azure2023_conv.csv.gz" \
		--also "$(TRACES)/lengths_sharegpt8k.csv.gz" --profile gpu-8b-small --max-tokens 4096 --load 0.95 --requests 14000
	-$(POLICIES) governor $(CHAT)
	-$(POLICIES) backfill $(CHAT) --profile gpu-8b-small

gpu: $(STAMPS)/installed ## On a CUDA device: the kernels' table, tokens, graphs, then the benches
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) gpu-all; \
		else echo "there is no CUDA device here: nothing was run"; fi

gpu-all:
	$(BIN)/python -m pytest -m gpu
	@if command -v compute-sanitizer >/dev/null; then \
		compute-sanitizer --error-exitcode 1 $(BIN)/python -m pytest -m gpu -k "reference or rms_norm or silu or copy"; \
		else echo "compute-sanitizer is not there: the kernels ran without it"; fi
	$(BIN)/python benches/gpu_attention.py
	$(BIN)/python benches/gpu_engine.py

wheel: $(STAMPS)/installed ## One abi3 wheel for CPython 3.11 and newer, in dist/
	rm -rf dist
	$(BIN)/maturin build --release --out dist
	$(BIN)/python tests/check_wheel.py dist/*.whl

clean: ## Remove what make made (the model cache stays)
	rm -rf $(VENV) target dist

$(STAMPS)/venv:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust (1.89 or newer) first" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: set PYTHON to Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip 'maturin>=1.9,<2'
	@mkdir -p $(STAMPS) && touch $@

# Installs the dependencies (torch is large: the first time takes minutes) and the release build.
$(STAMPS)/installed: $(STAMPS)/venv pyproject.toml $(RUST_SOURCES)
	$(if $(wildcard $@),PIP_QUIET=1) VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --extras test,dev,bench
	@touch $@
