# `make demo` and `make test` set up all they need (a .venv with pinned versions), then run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: demo test kills devices oldest fidelity simulate check format clean system-deps

demo: $(STAMP)
	$(BIN)/tlora demo

# Where CI is set nothing may be skipped for want of a package.
test: $(STAMP) $(if $(CI),system-deps)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# A hundred seeded kills with SIGKILL instead of the suite's ten; prints what it found.
kills: $(STAMP)
	TLORA_KILLS=100 $(BIN)/python -m pytest tests/runtime/test_resuming.py -k kills -s

# The kernels compiled for every kind of device, rank and format instead of the suite's part.
devices: $(STAMP)
	TLORA_ALL_DEVICES=1 $(BIN)/python -m pytest tests/kernels/multi_lora/test_shared_memory.py

# The same, and all else that is compiled, by the oldest Triton that is supported (torch 2.11 has it).
OLDEST := build/triton-3.6.0
oldest: $(STAMP)
	test -d $(OLDEST) || $(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST) triton==3.6.0
	PYTHONPATH=$(OLDEST) TLORA_ALL_DEVICES=1 $(BIN)/python -m pytest -n $(WORKERS) \
		tests/kernels/multi_lora/test_shared_memory.py tests/kernels/*/*compil*.py

# Real runs over two processes against simulated ones; some 20 minutes of a machine that does
# nothing else. Fails where they disagree.
fidelity: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fidelity.py --json benchmarks/results/fidelity.jsonl

# Every policy on two real traces (TLORA_TEST_DATA), five seeds, one factor at a time: hours on two
# cores. Broken off, it goes on from where it was. Prints the tables of docs/simulation.md.
STUDY ?= benchmarks/results/simulate.jsonl
simulate: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/simulate_study.py --output $(STUDY)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -m "not slow and not real_data"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[data,bench,test,dev]"
	touch $@

# Debian packages that some tests need.
system-deps:
	command -v chromium || (apt-get update && apt-get install -y --no-install-recommends chromium)
	command -v cc || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
