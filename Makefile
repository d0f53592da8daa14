# make demo and make test need Python 3.11, git and make, and nothing else.
PYTHON ?= python3
VENV ?= .venv
IPEX_VENV ?= .venv-ipex
BIN := $(VENV)/bin
# a release of torch, or "newest"
TORCH ?= 2.13.0
# Three processes for two cores, since tests of real runs wait (tests/conftest.py). A file stays in one process, so that
# its run is made once, and the files keep the order of tests/conftest.py.
PYTEST_ARGS ?= -n auto --dist loadfile --no-loadscope-reorder
# The same for suites of real runs, which are measured on two cores.
HARD_ARGS ?= -n 2 --dist loadfile
PEERS_VENV := .venv-peers
MLPERF_VENV := .venv-mlperf
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup setup-dev demo test test-all test-faults test-attacks test-cluster check docs bench wheel test-ipex peers test-peers test-nightly test-marked-nightly clean

# The environment of a user: the package and its dependencies.
setup: .setup-stamp

# Torch is installed first and alone: from the configured index if its build needs no CUDA packages, else from
# PyTorch's CPU index. A constraints file then keeps the installed version.
.setup-stamp: setup.py pyproject.toml tools/install_torch.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_torch.py $(TORCH) $(CPU_INDEX)
	$(BIN)/python -m pip freeze --exclude-editable | grep -i '^torch==' > constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt
	touch .setup-stamp

# The additions for a developer: test tools, linters, and the systems that conversions are compared with.
setup-dev: .setup-dev-stamp

.setup-dev-stamp: .setup-stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt
	touch .setup-dev-stamp

demo: setup
	$(BIN)/python tools/demo.py

# The tests that have no mark of a tier.
test: setup-dev
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m 'not slow and not nightly'

# The other tests that run at every commit.
test-all: setup-dev
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m 'slow and not nightly'

# Kills, signals, full disks and damaged files on real runs, with figures at the end: up to an hour of two cores.
# SPEECHTRAIN_FLIPS=1 flips every bit of a run's small files, and the default flips a share of them.
test-faults: setup-dev
	$(BIN)/python -m pytest -q $(HARD_ARGS) tests/faults

# Every launcher with its real engine. A missing engine is a failure here, while .ci/run skips its tests.
test-cluster: setup-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps impi-rt  # Intel MPI's engine
	SPEECHTRAIN_ENGINES=must $(BIN)/python -m pytest -q tests/integration/test_launch_*.py

# One attack for each rule of SECURITY.md and each door: also those that take too long for CI.
test-attacks: setup-dev
	$(BIN)/python -m pytest -q $(HARD_ARGS) tests/attacks

# .pre-commit-config.yaml has the same commands, by test.
check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy speechtrain
	$(BIN)/mypy launchers
	$(BIN)/mypy examples/by_hand.py examples/own_module.py
	$(BIN)/python tools/check_workflows.py

# The searchable site of docs/ in build/site/, with pages of the Python API and of conf/.
docs: setup-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The benchmarks that need no argument. The help of the others (--help) lists their arguments.
bench: setup-dev
	for name in accelerators cpu_step data_resume features memory scaling transducer_loss wav2vec2; do \
		$(BIN)/python benchmarks/$$name.py || exit 1; done

# The wheel and the sdist in dist/.
wheel: setup-dev
	$(BIN)/python -m build

# Intel's extension ended with torch 2.8, so it gets a separate environment (7 GB and minutes to fetch if the index
# has only the CUDA build of torch).
test-ipex: $(IPEX_VENV)/.stamp
	$(IPEX_VENV)/bin/python -m pytest -q tests/device/test_ipex_real.py

$(IPEX_VENV)/.stamp: setup.py pyproject.toml tools/install_torch.py
	$(PYTHON) -m venv $(IPEX_VENV)
	echo 'torch==2.8.0' > $(IPEX_VENV)/constraints.txt
	$(IPEX_VENV)/bin/python tools/install_torch.py 2.8.0 $(CPU_INDEX) || \
		$(IPEX_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.8.0
	$(IPEX_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(IPEX_VENV)/constraints.txt -e '.[ipex]' pytest pytest-timeout hypothesis
	touch $(IPEX_VENV)/.stamp

# Other training systems, as oracles. torchaudio needs the CUDA build of the same torch version (6 GB), which also
# runs on a CPU. benchmarks/parakeet.py, parakeet_speech.py and transducer_loss.py --against torchaudio run in it.
peers: $(PEERS_VENV)/.stamp

test-peers: peers
	$(PEERS_VENV)/bin/python -m pytest -q tests/unit/losses tests/unit/interop/test_parakeet_hf.py

$(PEERS_VENV)/.stamp: setup.py pyproject.toml
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.11.0 torchaudio==2.11.0
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[interop,peers]' accelerate pytest pytest-timeout pytest-xdist hypothesis
	touch $(PEERS_VENV)/.stamp

# The tests that take too long for CI: every launcher, all attacks, all faults, and the other tests marked nightly, such
# as the rehearsal of absent devices. All suites run even if one of them fails.
test-nightly:
	$(MAKE) --jobs=1 --keep-going test-marked-nightly test-cluster test-attacks test-faults

# MLPerf's checker, and the lines of the Dockerfile in an empty environment. MLPerf's checker needs PyYAML only. Its
# other dependencies serve other programs.
test-marked-nightly: setup-dev $(MLPERF_VENV)/.stamp
	SPEECHTRAIN_MLPERF_PYTHON=$(CURDIR)/$(MLPERF_VENV)/bin/python $(BIN)/python -m pytest -q -m nightly \
		--ignore-glob='*/test_launch_*.py' --ignore=tests/attacks

$(MLPERF_VENV)/.stamp:
	$(PYTHON) -m venv $(MLPERF_VENV)
	$(MLPERF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		mlperf-logging==4.1.68 pyyaml
	touch $(MLPERF_VENV)/.stamp

clean:
	rm -rf $(VENV) $(IPEX_VENV) $(PEERS_VENV) $(MLPERF_VENV) .setup-stamp .setup-dev-stamp constraints.txt build dist *.egg-info
