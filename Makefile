# make demo   set up, make sample data, train a small model, forecast with it
# make demo-ensemble   the demo's sibling: go on from its weights, train members that differ by noise with a CRPS, and
#             forecast with eight, beside the demo's forecast
# make test   set up, run the tests without the slow ones; FILES=tests/test_vit.py or PYTEST_ARGS="-k name" run some,
#             WORKERS=4 more at a time
# make test-all   set up, run all tests, and print which lines they reach; takes the same variables, and COVERAGE= for none
# make setup  the environment alone (.venv); TORCH="torch==2.11.0 --index-url ..." with another build of torch,
#             SITE_TORCH=1 with the torch that a loaded module gives (docs/launch.md)
# make lock   write requirements/lock.txt, the version of everything that is installed, for continuous integration
# make lint   ruff: lint and format check; mypy: types; import-linter: what may import what; plain_code: how dense it is
# make site   build the pages as a web site into site/, in half a minute; make site-serve: show it on this machine, anew after each change
# make slides   slides of the four rungs and of the collectives into slides/, one file each, with notes and minutes
# make drawings   make the drawings of the docs again; make notebooks: the lessons as notebooks
# make lint-docs   English of README and docs, by textlint (needs npm)
# make figures   run every command whose output README and docs show, and show what they say now; ONLY=plan.py some
# make preflight   check what a run rests on: software, devices, folders; RANKS=2 also connects that many ranks
# make gpu    run all that needs a GPU, in 15 minutes, and report it in docs/results; ARGS="--out FOLDER", PY=python3
# make slurm  a Slurm cluster of 4 nodes on this machine; make slurm-shell: use it; make slurm-stop: end it
# make exercise   list the exercises; N=3 checks yours, N=3 SOLUTION=1 its solution (exercises/README.md)
# make faults ROUNDS=3   break running jobs in many ways and compare their losses
# make fuzz MINUTES=10   feed every reader and every command hostile input, and run compositions of all options
# exercise and preflight need no .venv of their own where an environment with torch is active.
.PHONY: afresh demo demo-ensemble setup test about-test test-all lock lint lint-docs figures drawings notebooks site about-site site-serve slides clean exercise faults fuzz gpu preflight slurm slurm-shell slurm-stop

PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Processes that share out the files of tests, each with about 4 GB; 0: none, which starts sooner.
WORKERS ?= $(if $(filter 1,$(words $(FILES))),0,3)
# Without kept bytecode, which a container's image may ask for, each program of a test compiles all of our modules anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
COVERAGE ?= --cov --cov-report=term# in this order: a bare --cov would take the next word, a file, for what to count

# A python that has torch: of the active environment, of this clone, or of the system; nothing where there is none.
has_torch = import importlib.util as i, sys; sys.exit(i.find_spec("torch") is None)
ready = for each in $${VIRTUAL_ENV:+"$$VIRTUAL_ENV/bin/python"} $(PY) $(PYTHON); do \
    "$$each" -c '$(has_torch)' 2>/dev/null && echo "$$each" && break; done
READY := $(if $(filter exercise preflight,$(MAKECMDGOALS)),$(shell $(ready)))

demo: setup
	$(BIN)/python -m weather.sample_data data/quick
	$(BIN)/python train.py --config=demo
	$(BIN)/python forecast.py --run_folder logs/demo/00

# It goes on from the weights of the demo, which comes first where it was not run.
demo-ensemble: setup $(if $(wildcard logs/demo/00/forecast/skill.json),,demo)
	$(BIN)/python -m weather.sample_data data/quick
	$(BIN)/python train.py --config=demo_ensemble
	$(BIN)/python forecast.py --run_folder logs/demo_ensemble/00 --ensemble_size=8 --compare logs/demo/00

setup: .venv/installed

about-test:
	@echo "running the quick tests: seven minutes on two cores, one file in seconds"

test: about-test .venv/installed-dev
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) $(FILES)

test-all: .venv/installed-dev .venv/installed-models
	$(PYTEST) $(COVERAGE) $(PYTEST_ARGS) $(FILES)

# Without torch: requirements.txt names its release, and each machine takes its own build of it.
lock: .venv/installed-dev
	echo '# The version of everything that the tests install, for continuous integration: `make lock` writes it.' > requirements/lock.txt
	$(BIN)/python -m pip freeze | grep -v '^torch==' >> requirements/lock.txt

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.plain_code

# The tool lies in .cache, out of the tree.
lint-docs:
	@command -v npm >/dev/null || { echo "make lint-docs needs npm (Node.js)"; exit 2; }
	@mkdir -p .cache/english && cp docs/english/.textlintrc.json docs/english/words.yml .cache/english
	@cmp -s docs/english/package.json .cache/english/package.json || \
	    { cp docs/english/package.json .cache/english && npm install --prefix .cache/english --no-package-lock --silent; }
	cd .cache/english && node_modules/.bin/textlint ../../*.md ../../.github/*.md ../../exercises/*.md ../../docs/*.md ../../docs/reference/*.md

figures: .venv/installed-dev
	ONLY="$(ONLY)" $(BIN)/cog -r -U -I . -p "from docs.figures import above, difference, output, picture, reading, source, table" docs/*.md docs/reference/*.md

drawings: .venv/installed
	$(BIN)/python -m docs.drawings

notebooks: .venv/installed-dev
	$(BIN)/python -m docs.notebooks

about-site:
	@echo "making a page of each text and of the code that texts link to, and looking for lost links: half a minute"

site: about-site .venv/installed-site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --config-file .mkdocs.yml --strict
	@echo "open site/index.html, or make site-serve"

site-serve: .venv/installed-site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve --config-file .mkdocs.yml --dev-addr 127.0.0.1:8000

slides: .venv/installed-site
	$(PY) -m docs.slides

exercise: $(if $(READY),,.venv/installed)
	@$(or $(READY),$(PY)) -m exercises.check $(N) $(if $(SOLUTION),--solution) $(if $(SEED),--seed $(SEED))

faults: .venv/installed-dev
	$(BIN)/python -m tests.faults --rounds $(or $(ROUNDS),1)

fuzz: .venv/installed-dev
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),1)
	$(BIN)/python plan.py check --all --minutes $(or $(MINUTES),2)

preflight: $(if $(READY),,.venv/installed)
	@$(or $(READY),$(PY)) -m $(if $(RANKS),torch.distributed.run --nproc_per_node $(RANKS) -m )tools.preflight

gpu: $(if $(filter $(BIN)/python,$(PY)),.venv/installed-dev)
	@$(PY) -m tools.gpu_report $(ARGS)

slurm:
	@tests/slurm/cluster.sh start

slurm-shell:
	@tests/slurm/cluster.sh shell

slurm-stop:
	@tests/slurm/cluster.sh stop

clean:
	rm -rf .venv

# torch comes first and alone, so that nothing else can pull another build of it. Asked for another one, .venv is new.
.venv/installed: requirements.txt $(if $(TORCH)$(SITE_TORCH),afresh)
	$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d, 3.11 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(if $(SITE_TORCH),$(PYTHON) tools/torch_version.py)
	$(PYTHON) -m venv $(if $(TORCH)$(SITE_TORCH),--clear) $(if $(SITE_TORCH),--system-site-packages) .venv || { echo "python3 -m venv failed: install it (Debian: apt install python3-venv)"; exit 1; }
	$(if $(SITE_TORCH),,$(PIP) $(or $(TORCH),$$(grep '^torch==' requirements.txt)))
	$(if $(TORCH),$(BIN)/python tools/torch_version.py)
	grep -v '^torch==' requirements.txt | $(PIP) -r /dev/stdin
	touch $@

# The site needs the planner, whose numbers it shows, and nothing of the tests.
.venv/installed-site: requirements/site.txt .venv/installed
	$(PIP) -r requirements/site.txt
	touch $@

.venv/installed-dev: requirements/dev.txt requirements/site.txt requirements/era5.txt requirements/maps.txt requirements/dali.txt requirements/fp8.txt requirements/trackers.txt .venv/installed
	$(PIP) -r requirements/dev.txt -r requirements/site.txt -r requirements/era5.txt -r requirements/maps.txt
	$(PIP) -r requirements/dali.txt || echo "no NVIDIA DALI for this machine: its tests will be skipped"
	$(PIP) -r requirements/fp8.txt || echo "no torchao for this machine: its tests will be skipped"
	$(PIP) -r requirements/trackers.txt || echo "no MLflow or Weights & Biases: their tests will be skipped"
	touch $@

# torch-harmonics names a single release of torch. What is used of it is Python alone and runs on others.
.venv/installed-models: requirements/models.txt .venv/installed
	$(BIN)/python -m pip freeze | $(PIP) -c /dev/stdin -r requirements/models.txt || echo "no public models for this machine: their tests will be skipped"
	$(PIP) --no-deps torch-harmonics==0.9.3 || echo "no torch-harmonics for this machine: its test will be skipped"
	touch $@
