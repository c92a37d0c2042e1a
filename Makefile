# make demo   set up, make sample data, train a small model, print its skill
# make test   set up, run the whole test suite
# make setup  the environment alone (.venv)
# make lint   ruff: lint and format check
.PHONY: demo setup test lint clean

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

demo: setup
	$(BIN)/python -m utils.sample_data data/quick
	$(BIN)/python train.py --config=quick

setup: .venv/installed

test: .venv/installed-dev
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv

# torch comes first and alone, so that nothing else can pull another build of it.
.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d, 3.11 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv || { echo "python3 -m venv failed: install it (Debian: apt install python3-venv)"; exit 1; }
	$(PIP) $$(grep '^torch==' requirements.txt)
	$(PIP) -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt requirements-era5.txt requirements-dali.txt .venv/installed
	$(PIP) -r requirements-dev.txt -r requirements-era5.txt
	$(PIP) -r requirements-dali.txt || echo "no NVIDIA DALI for this machine: its tests will be skipped"
	touch $@
