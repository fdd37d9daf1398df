# `make help` lists what there is. KIND=cpu or KIND=gpu overrides what the machine has, VENV another environment.

VENV ?= .venv
KIND ?=
RUN = $(VENV)/bin/python -m

# The locks are resolved with 3.11, so that one is tried first.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-full test-gpu lint lock clean need-python bench-index bench-router bench-agreement bench-store bench-policy bench-peers checkov lab

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: need-python ## make .venv and install the locks (seconds when nothing changed)
	@$(PYTHON) requirements/install.py $(VENV) $(KIND)

demo: setup ## start a cluster here with a real model, chat with it, show what was cached
	@$(VENV)/bin/manta demo

test: setup lint ## all tests but the long ones and those that need a GPU, under 30 minutes on two cores
	@$(RUN) pytest -m "not long and not gpu"

test-fast: setup lint ## tests without an engine, under 2 minutes
	@$(RUN) pytest tests/unit

test-full: setup lint ## all tests but those that need a GPU
	@$(RUN) pytest -m "not gpu"

test-gpu: setup ## tests that need a GPU
	@$(RUN) pytest -m gpu

HOSTS ?= 3
lab: setup ## hosts on this machine to deploy on, cut and kill, until Ctrl-C (root; HOSTS=3)
	@$(RUN) tests.hosts --hosts $(HOSTS)

lint: setup ## style, format and types
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

bench-index: setup ## time the prefix index and the decision, beside peers where they are installed (STRICT=1 fails on a miss)
	@$(RUN) benchmarks.bench_index

bench-router: setup ## what the deployed router adds to a request and a token, beside peers; eight minutes
	@$(RUN) benchmarks.bench_router

bench-agreement: setup ## our serving benchmark beside vLLM's own, on the same endpoint; four minutes
	@$(RUN) benchmarks.bench_agreement

bench-store: setup ## what the stores of KV do, beside other stores and beside no store; twenty minutes
	@$(RUN) benchmarks.bench_store

bench-policy: setup ## simulate policies and other routers' rules on the same workloads; ten minutes on two cores (WHOLE=1: hours; STRICT=1 fails on a miss)
	@$(RUN) benchmarks.bench_policy

bench-peers: need-python ## install the peers that benchmarks measure beside, in .venv-bench
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/bench.lock
	@.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target .venv-bench/lmcache -r requirements/bench-lmcache.lock

checkov: need-python ## install checkov, by which tests/k8s judges the manifests, in .venv-k8s
	@$(PYTHON) -m venv .venv-k8s
	@.venv-k8s/bin/python -m pip --disable-pip-version-check install --quiet checkov==3.3.30

lock: need-python ## resolve requirements/*.lock anew
	@$(PYTHON) requirements/refresh.py

clean: ## remove .venv and what tools left
	@rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

need-python:
	@test -n "$(PYTHON)" || { echo "found no Python 3.11 or newer with venv; install one or say PYTHON=/path/to/python"; exit 1; }
