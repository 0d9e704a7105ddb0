# Every target makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Makes environments, where it is there, in a quarter of pip's time; it reads none of pip's
# configuration: UV= goes without it.
UV := $(shell command -v uv)
ifeq ($(UV),)
MAKE_VENV := $(PYTHON) -m venv
INSTALL = $(1)/bin/python -m pip install -qq --disable-pip-version-check
else
MAKE_VENV := $(UV) venv --quiet --seed --allow-existing --python $(PYTHON)
INSTALL = $(UV) pip install --quiet --python $(1)/bin/python
endif
PIP := $(call INSTALL,$(VENV)) --constraint constraints.txt
# Enough to run the GPU proof without this environment (a machine with no network).
GPU_NEEDS := torch, numpy, xxhash, pytest, hypothesis
# More than two cores: tests wait for processes, disks and deadlines half of their time.
JOBS ?= 3
ONLY ?=
# Of the GPU proof; TO is the file that every line is appended to, PROOF are more options.
PART ?= 1
TO ?= build/gpu-proof.jsonl
PROOF ?=
# Where make compat keeps its environments, some gigabytes each; which pairs (all six).
COMPAT ?= build/compat
PAIRS ?=
FULLY_COVERED := checkfreq/store/*,checkfreq/policy/*,checkfreq/restore/stream.py,checkfreq/restore/reads.py,checkfreq/restore/buffers.py,checkfreq/testing/crashing.py,iterators/order/epoch.py
# What covers that alone. Tracing makes tests in Python take twice as long: the others run without.
COVERING := $(filter-out %/test_trace_simulation.py %/test_joint_power_cut.py, \
    $(wildcard tests/policy/test_*.py tests/store/test_*.py)) tests/testing \
  tests/restore/test_stream.py tests/restore/test_shared_reads.py tests/restore/test_buffers.py \
  tests/iterators/order
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Containers often forbid it; without bytecode each of thousands of processes compiles our sources,
# and pytest rewrites the assertions of all tests in each target and each of its workers.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test test-more compat servers packaging coverage lint docs bench gpu-proof system \
  clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.bench ## train, kill twice, resume, compare bit for bit (under a minute)
	$(PY) -m benchmarks.demo

# ONLY=checkfreq/restore, or several: the tests of these folders alone.
test: $(if $(ONLY),$(VENV)/.dev,lint system) ## what CI runs first: format, lint, types, tests, coverage; ONLY=checkfreq/restore in seconds
ifeq ($(ONLY),)
	rm -f .coverage
	$(PYTEST) -m "not gpu and not more" --cov --cov-report= $(COVERING)
	$(PY) -m coverage report --include='$(FULLY_COVERED)' --fail-under=100
	$(PYTEST) -m "not gpu and not more" $(addprefix --ignore=,$(COVERING))
else
	$(PYTEST) -m "not gpu and not more" $(patsubst %,tests/%,$(patsubst tests/%,%,$(ONLY:checkfreq/%=%)))
endif

test-more: $(VENV)/.dev servers packaging system ## what CI runs after it: benchmarks, large frameworks, SLURM, S3, examples, documentation
	$(PYTEST) -m "more and not gpu"

compat: $(VENV)/.bench ## the core of the tests with each pair of Python and torch: PAIRS="3.10=2.11.* 3.13="
	$(PY) -m benchmarks.versions.environments --folder $(COMPAT) $(PAIRS); \
	  status=$$?; $(PY) -m benchmarks.tables; exit $$status

coverage: $(VENV)/.dev system ## how much of both packages make test covers (twice its time)
	rm -f .coverage
	$(PYTEST) -m "not gpu and not more" --cov --cov-report=
	$(PY) -m coverage report --skip-covered

lint: $(VENV)/.dev ## ruff and mypy
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy --strict checkfreq iterators

docs: $(VENV)/.docs ## the documentation, into build/docs; a warning is an error
	$(PY) -m sphinx -qW --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

bench: $(VENV)/.peers ## the suite on the CPU (about 20 minutes); appends to benchmarks/results, rewrites the pages
	$(PY) -m benchmarks run --minutes 25 $(ONLY)

gpu-proof: ## what only a GPU can show: PART=1 (7 minutes), 2 (3 minutes) or 3 (20 minutes); uses PYTHON as it is where that has PyTorch
	@py=$(PYTHON); if ! $$py -c 'import $(GPU_NEEDS)' 2>/dev/null; then \
	  $(MAKE) $(VENV)/.dev; py=$(PY); fi; set -ex; \
	PYTHONPATH=. $$py -m tests.gpu --part $(PART) --out '$(TO)' $(PROOF)

# S3 servers for tests/s3, in an environment of their own; without them, they skip with a reason.
servers: .venv-servers/.ready ## the servers that tests start, in .venv-servers

.venv-servers/.ready: tests/s3/requirements.txt
	$(MAKE_VENV) .venv-servers
	$(call INSTALL,.venv-servers) --requirement $<
	@touch $@

packaging: .venv-packaging/.ready ## build and twine for tests/packages, in .venv-packaging

.venv-packaging/.ready: tests/packages/requirements.txt
	$(MAKE_VENV) .venv-packaging
	$(call INSTALL,.venv-packaging) --requirement $<
	@touch $@

# Tests that mount file systems, inject system-call errors or start a SLURM skip, with a reason,
# without these (under .ci/run those of a SLURM fail).
SYSTEM := e2fsprogs xfsprogs strace slurmctld slurmd slurm-client
system:
	@if ! which mkfs.ext4 mkfs.xfs strace slurmctld slurmd srun >/dev/null 2>&1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
	      --no-install-recommends $(SYSTEM); } >/dev/null 2>&1 \
	    || echo "some system packages could not be installed: the tests that need them skip"; \
	  else echo "one of $(SYSTEM) is not here: the tests that need it skip"; fi; fi

# torchvision comes without its dependencies: they would replace a CPU-only torch.
$(VENV)/.bench: setup.py constraints.txt
	$(MAKE_VENV) $(VENV)
	$(PIP) torch numpy pillow
	$(PIP) --no-deps torchvision
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.peers: $(VENV)/.bench
	$(PIP) --editable '.[peers]'
	@touch $@

$(VENV)/.docs: $(VENV)/.bench
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.dev: $(VENV)/.bench tests/iterators/data/requirements.txt
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/iterators/data/requirements.txt
	@touch $@

clean: ## remove the virtual environment and what tests and benchmarks left
	rm -rf $(VENV) .venv-servers .venv-packaging build *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out
