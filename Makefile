PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test slow durations lint docs package bench bench-offload bench-tensors bench-hosts wires matrix faults gpu
.DEFAULT_GOAL := test

# Train a small GPT under stage 3 on two processes; ARGS adds to the command line.
train: .venv/stamp
	OMP_NUM_THREADS=1 $(BIN)/python examples/train_gpt.py fit --config examples/zero3.yaml $(ARGS)

# Lint, types and the tests that are not slow, the longest first; ARGS adds to pytest's command line.
MARKS = not slow
PYTEST = $(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1
test: lint
	$(PYTEST) -m "$(MARKS)" $(ARGS)

# The slow tests: benchmarks, examples and what a faster test shows in part.
slow: .venv/stamp
	$(PYTEST) -m slow $(ARGS)

# Times all tests, for the scheduler: writes tests/durations.tsv.
durations: .venv/stamp
	$(PYTEST) --write-durations $(ARGS)

lint: .venv/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lightning_zero

# The site, in site/; a broken link or a public name without a docstring is an error.
docs: .venv/docs
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Wheel and source distribution, in dist/, checked as an index would.
package: .venv/docs
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

# Step time, memory and traffic beside DDP, FSDP and others; ARGS adds to the command line.
bench: .venv/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore examples/benchmarks/compare.py $(ARGS)

# Steps and predictions from files beside the disk and memory; ARGS adds to the command line.
bench-offload: .venv/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore examples/benchmarks/offload.py $(ARGS)

# Setup, save and resume of many small parameters beside DDP; ARGS adds to the command line.
bench-tensors: .venv/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore examples/benchmarks/small_tensors.py $(ARGS)

# Every transport beside torch's own collectives: what `Communicator` chooses by; ARGS adds to the command line.
wires: .venv/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore examples/benchmarks/wires.py $(ARGS)

# The quick tests with other interpreters, versions of torch and of Lightning, in fresh environments.
matrix:
	$(PYTHON) examples/benchmarks/matrix.py $(ARGS)

# Step times over hosts that share a slow link, played by this machine; needs the rights of root.
bench-hosts: .venv/stamp
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore examples/benchmarks/hosts.py $(ARGS)

# A fault of every kind at every place of a step, a save and a load.
faults: .venv/stamp
	$(BIN)/python -m pytest -m slow tests/engine/test_faults.py $(ARGS)

# Tests and comparison on a machine with a GPU, by the Python and torch that are there.
gpu:
	PYTHONPATH=. OMP_NUM_THREADS=1 $(PYTHON) -W ignore examples/benchmarks/gpu.py $(ARGS)

# torch comes first and alone, so that the build for this machine is found before anything
# else asks for it.
.venv/stamp: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --group dev --editable .
	touch $@

.venv/docs: .venv/stamp
	$(BIN)/pip install --quiet --group docs
	touch $@
