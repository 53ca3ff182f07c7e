# make quickstart   train a small policy from nothing, on this machine
# make rlhf         reward model, reward server and PPO with a critic, on this machine
# make agents       GRPO on episodes of several turns: a frozen lake, and a calculator as a tool, on this machine
# make number_game  a small vision-language model from nothing, supervised and then GRPO, on this machine
# make smollm       SmolLM2-135M-Instruct, from a package of PyPI, learns to add by GRPO, on this machine
# make test         the tests for every change, JOBS files at a time: units, contracts, a real run of each command
# make test_all     every test that needs no GPU: make test, and those marked "full"
# make gpu          the tests that need a GPU, and a report of what they measured, by PYTHON, which has pytest and
#                   requirements/gpu.txt
# make check        format, lint, types, layers
# make docs         regenerate the generated pages, check the links, build the site into site/
# make release      check, build, try the wheel in an empty environment, tag

SEED ?= 0
# two more than there are cores, since tests wait too, if each has 6 GB of memory; at least two
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemTotal/ {n = int($$2 / 6e6); n = n < cores + 2 ? n : cores + 2; \
	print (n > 2 ? n : 2)}' /proc/meminfo)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup quickstart rlhf agents number_game smollm test test_all gpu check docs release

setup: $(READY)
	@echo "$(VENV) is ready. Next: make quickstart, or source $(BIN)/activate for your own runs"

$(READY): requirements/base.txt requirements/cpu.txt requirements/test.txt requirements/docs.txt \
		requirements/install.sh setup.py pyproject.toml
	@bash requirements/install.sh $(VENV) $(PYTHON)
	@touch $@

quickstart: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" SEED=$(SEED) bash examples/scripts/quickstart.sh

rlhf: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" SEED=$(SEED) bash examples/scripts/rlhf_cpu.sh

agents: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" SEED=$(SEED) bash examples/scripts/agents_cpu.sh

number_game: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" SEED=$(SEED) bash examples/scripts/number_game_cpu.sh

smollm: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" SEED=$(SEED) bash examples/scripts/smollm_cpu.sh

PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile \
	--no-loadscope-reorder --max-worker-restart 1

test: $(READY)
	@$(PYTEST) -m "not gpu and not full" tests

test_all: test
	@$(PYTEST) -m "full and not gpu" tests

gpu:
	@$(or $(PYTHON),python3) -m tests.gpu.report

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/hadolint dockerfile/Dockerfile
	@$(BIN)/python -m pytest -q tests/unit/test_layers.py

docs: $(READY)
	@$(BIN)/python docs/build.py

release: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python release/make.py
