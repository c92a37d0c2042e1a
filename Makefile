# make demo   set up, make sample data, train a small model, print its skill
# make test   set up, run the whole test suite
# make setup  the environment alone (.venv)
# make lint   ruff: lint and format check
.PHONY: demo setup test lint clean

PYTHON ?= python3
BIN := .venv/bin

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
