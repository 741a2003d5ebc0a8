# Every target makes its own virtual environment when it is missing.
PYTHON ?= python3
VENV   := .venv
DEVICE ?= cpu
JOBS   ?= 2
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Two at a time. Each runs one thread: several that wait for each other on the same cores take many times as long.
# Byte code is kept, even if the environment says not to: tests start many processes, which would all compile sonde.
TESTS  := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

# One environment for each torch and Python, in a folder that git ignores.
TORCH      ?= newest
TORCH_ENVS ?= .torch
TORCH_ENV  := $(TORCH_ENVS)/$(TORCH)-$(notdir $(PYTHON))
TORCH_PIN  := $(if $(filter newest,$(TORCH)),torch,torch==$(TORCH))

# torchtitan asks for a newer torch and older datasets than the tests' own.
TITAN_ENV := .torchtitan
TITAN_PIP := torch==2.14.1 torchtitan==0.3.0 datasets==4.1.1 hypothesis pytest pytest-timeout pytest-xdist numpy

# What a machine with a GPU may lack that has torch, transformers, accelerate, peft, pytest, hypothesis and numpy.
GPU_WHEELS := tyro docstring_parser typeguard typing_extensions rich markdown-it-py mdurl pygments pytest-timeout
GPU_PYTHON ?= 3.12

.PHONY: help demo demo-entropy demo-check test test-torch test-torchtitan check bench bench-present bench-budget bench-norm bench-entropy bench-advice bench-log study study-smoke gpu-check docs docs-figures newest-torch clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small language model on 2 processes and judge its batch size (about 2 minutes)"
	@echo "make demo-entropy   train a tiny policy by GRPO and forecast its entropy (about 1 minute)"
	@echo "make demo-check   try what the demo advises; writes benchmarks/results/"
	@echo "make test    run all tests"
	@echo "make test-torch TORCH=2.9.1   run the tests with another torch; PYTHON=python3.13 with another Python"
	@echo "make test-torchtitan   run the tests of torchtitan's Trainer, in an environment of their own"
	@echo "make check   lint, type-check, then run all tests (what CI runs)"
	@echo "make docs    build the documentation as a site, in build/docs"
	@echo "make docs-figures   run both demos and two trackers, and make the pictures of docs/ again (about 5 minutes; needs Chromium)"
	@echo "make bench   measure what the probe costs and how exact it is; writes benchmarks/results/; DEVICE=cuda on a GPU"
	@echo "make bench-present   compare the noise scale with exact values in real trainings; writes benchmarks/results/"
	@echo "make bench-budget   measure what a budget of 1 % costs; writes benchmarks/results/"
	@echo "make bench-norm   measure the global norm and the clip; writes benchmarks/results/"
	@echo "make bench-entropy   measure how right forecasts of entropy are, and what they cost; writes benchmarks/results/"
	@echo "make bench-advice   follow what is advised, and time it; writes benchmarks/results/"
	@echo "make bench-log   measure the log of a long run and its report; writes benchmarks/results/"
	@echo "make study   compare noise scales with measured critical batch sizes (3 hours on 2 cores, JOBS=2; goes on where it ended; the figure needs Chromium)"
	@echo "make study-smoke   a tiny piece of each kind of the study (half a minute)"
	@echo "make gpu-check   prepare .gpu/ for a machine with a GPU and no network, and print the command to run there (8 minutes)"
	@echo "make clean   remove the virtual environments and caches"

$(VENV)/.created:
	@echo "==> creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) && touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing sonde and what its report needs (torch is large: a few minutes on a slow line)"
	@$(PIP) install --constraint constraints.txt --editable '.[report]' && touch $@

$(VENV)/.trl: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing sonde, TRL and what the report needs (torch is large: a few minutes on a slow line)"
	@$(PIP) install --constraint constraints.txt --editable '.[report,trl]' && touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing sonde and what its documentation needs (torch is large: a few minutes on a slow line)"
	@$(PIP) install --constraint constraints.txt --editable '.[docs]' && touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing sonde with everything its tests and benchmarks need"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]' && touch $@ $(VENV)/.demo $(VENV)/.docs

$(VENV)/.bench: $(VENV)/.dev benchmarks/requirements.txt
	@echo "==> installing the estimators that sonde is compared with, without their own requirements"
	@$(PIP) install --no-deps --requirement benchmarks/requirements.txt && touch $@

demo: $(VENV)/.demo
	@$(BIN)/sonde demo

demo-check: $(VENV)/.dev
	@echo "==> the demo, and what it advises, tried (about 30 minutes on 2 cores)"
	@$(BIN)/python -m benchmarks.demo_check

demo-entropy: $(VENV)/.trl
	@$(BIN)/sonde demo entropy

test: $(VENV)/.dev
	@echo "==> tests"
	@$(TESTS)

$(TORCH_ENV)/.created: pyproject.toml constraints.txt
	@echo "==> installing $(TORCH_PIN) and what the tests need in $(TORCH_ENV) (several gigabytes)"
	@$(PYTHON) -m venv $(TORCH_ENV)
	@grep -v '^torch==' constraints.txt > $(TORCH_ENV)/constraints.txt
	@$(TORCH_ENV)/bin/python -m pip --disable-pip-version-check --quiet install --constraint $(TORCH_ENV)/constraints.txt \
		'$(TORCH_PIN)' --editable '.[dev]' && touch $@

# "newest" is a moving version: an environment that is there already gets the release that is newest today.
newest-torch: $(TORCH_ENV)/.created
	@$(if $(filter newest,$(TORCH)),$(TORCH_ENV)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade \
		--constraint $(TORCH_ENV)/constraints.txt torch)

test-torch: newest-torch
	@echo "==> tests with $(TORCH_PIN), $(TORCH_ENV)"
	@PYTHONPATH=$(CURDIR)/src $(TORCH_ENV)/bin/python \
		-m $(if $(ONLY),pytest $(ONLY),tests.where_it_works) -n 2 --dist worksteal

$(TITAN_ENV)/.created: pyproject.toml constraints.txt
	@echo "==> installing torchtitan and its torch in $(TITAN_ENV) (6 gigabytes)"
	@$(PYTHON) -m venv $(TITAN_ENV)
	@grep -Ev '^(torch|datasets|dill|fsspec|multiprocess)==' constraints.txt > $(TITAN_ENV)/constraints.txt
	@$(TITAN_ENV)/bin/python -m pip --disable-pip-version-check --quiet install --constraint $(TITAN_ENV)/constraints.txt \
		$(TITAN_PIP) --editable . && touch $@

# Not two at a time: each test has ranks of its own.
test-torchtitan: $(TITAN_ENV)/.created
	@echo "==> tests with $(wordlist 1,2,$(TITAN_PIP)), $(TITAN_ENV)"
	@PYTHONPATH=$(CURDIR)/src $(TITAN_ENV)/bin/python -m pytest -k torchtitan \
		tests/integrations/test_torchtitan.py tests/integrations/test_torchtitan_on_ranks.py tests/test_examples.py \
		tests/test_docs.py

check: $(VENV)/.dev
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> mypy --strict"
	@$(BIN)/mypy
	@echo "==> tests"
	@$(TESTS)

# Every warning is an error, also a link or a name in a docstring that leads nowhere. `make check` builds the site in a test.
docs: $(VENV)/.docs
	@$(BIN)/python -m sphinx -q -b html -E -n -W --keep-going -c docs . build/docs
	@echo "documentation  $(CURDIR)/build/docs/index.html"

docs-figures: $(VENV)/.dev
	@echo "==> running both demos, and taking pictures of their reports"
	@$(BIN)/python -m docs.figures

bench: $(VENV)/.bench
	@echo "==> benchmarks (more than an hour on 2 cores; leave the machine alone meanwhile)"
	@$(BIN)/python -m benchmarks.noise_scale --device $(DEVICE)
	@$(BIN)/python -m benchmarks.scaling --device $(DEVICE)
	@$(BIN)/python -m benchmarks.budget --device $(DEVICE)
	@$(BIN)/python -m benchmarks.idle_calls
	@$(BIN)/python -m benchmarks.windows_at_scale --out benchmarks/results
	@$(BIN)/python -m benchmarks.planning --out benchmarks/results

bench-present: $(VENV)/.bench
	@echo "==> benchmarks of the noise scale now, and of a measurement's windows (two hours on 2 cores, JOBS=2; what was recorded before stays)"
	@$(BIN)/python -m benchmarks.present_noise_scale --jobs $(JOBS)
	@$(BIN)/python -m benchmarks.checkpoint

bench-budget: $(VENV)/.dev
	@echo "==> benchmark of the budget (about 80 minutes on 1 core; leave the machine alone meanwhile)"
	@$(BIN)/python -m benchmarks.budget --device $(DEVICE)
	@$(BIN)/python -m benchmarks.idle_calls

bench-norm: $(VENV)/.bench
	@echo "==> benchmarks of the norm (about 10 minutes on 2 cores; leave the machine alone meanwhile)"
	@$(BIN)/python -m benchmarks.norm --device $(DEVICE)

bench-entropy: $(VENV)/.dev
	@echo "==> benchmarks of the entropy's forecast (about 15 minutes on 2 cores; leave the machine alone meanwhile)"
	@$(BIN)/python -m benchmarks.entropy

bench-advice: $(VENV)/.dev
	@echo "==> benchmark of advice in time (about an hour on 1 core; leave the machine alone meanwhile; goes on where it ended)"
	@$(BIN)/python -m benchmarks.advice

bench-log: $(VENV)/.dev
	@echo "==> benchmark of the log of a long run (less than a minute)"
	@$(BIN)/python -m benchmarks.long_run

study: $(VENV)/.dev
	@echo "==> the study (3 hours on 2 cores, JOBS=2; Ctrl-C keeps what is done, and the same command goes on)"
	@$(BIN)/python -m evidence --jobs $(JOBS)
	@$(BIN)/python -m evidence.figures

study-smoke: $(VENV)/.dev
	@$(BIN)/python -m evidence --smoke --jobs 1

gpu-check: $(VENV)/.created
	@rm -rf .gpu && $(PIP) download --dest .gpu --constraint constraints.txt --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 $(GPU_WHEELS)
	@echo "Copy this folder with .gpu/ to the machine, and run there, in its root:"
	@echo
	@echo "  python3 -m pip install --quiet --no-index --no-deps --upgrade --target /tmp/sonde-gpu .gpu/*.whl &&" \
		"PYTHONPATH=src:/tmp/sonde-gpu python3 -m benchmarks.gpu_check"

clean:
	rm -rf $(VENV) $(TORCH_ENVS) $(TITAN_ENV) .gpu build .pytest_cache .mypy_cache .ruff_cache .hypothesis
