# Each target sets up what it needs first: .venv with the locked packages, this project in it, Delta's jars.
# The second time that costs nothing. Needed on the machine: Python 3.11 or newer, Java 17 or newer.

VENV   := .venv
PYTHON_IN_VENV := $(VENV)/bin/python
MADE      := $(VENV)/.made
INSTALLED := $(VENV)/.installed
JARS      := $(VENV)/.jars
CLASSES   := build/spark-classes.jsa build/zookeeper-classes.jsa
PYTEST_ARGS ?=
# Of tests, two of them with a Spark session: half of the time of a test is waiting.
PROCESSES ?= 4
MINUTES   ?= 30

# Spark's workers run the environment's interpreter, and no other Spark or Python of the machine interferes.
# Compiled modules are kept: tests start hundreds of processes, and each would compile everything again.
export PYSPARK_PYTHON := $(CURDIR)/$(PYTHON_IN_VENV)
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport SPARK_HOME SPARK_CONF_DIR PYSPARK_SUBMIT_ARGS PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo test test-slow soak soak-year test-spark coverage check types hooks format docs bench bench-cache bench-scale-out \
        bench-state-size bench-rebalance bench-routing bench-disk-tier bench-driver bench-load bench-requests \
        bench-peers bench-anatomy bench-nexmark-sql bench-spark-latency \
        simulate lock clean java

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: java $(JARS) ## Find real events in 336,776 real flights, with Spark (about 2 minutes)
	@$(PYTHON_IN_VENV) -m examples.zeitgeist

test: java $(CLASSES) ## Run the tests but for the slow ones (about 8 minutes on 2 cores); PYTEST_ARGS="-k lease" for some
	@$(PYTHON_IN_VENV) -m pytest -n $(PROCESSES) -m "not (spark_all or slow or fault)" $(PYTEST_ARGS)

test-slow: java $(CLASSES) ## Run the slow tests: faults, kills, simulation, planted bugs, whole examples (about 10 minutes)
	@$(PYTHON_IN_VENV) -m pytest -n $(PROCESSES) -m "(slow or fault) and not spark_all" $(PYTEST_ARGS)

test-spark: java $(JARS) ## Run on Spark all that `make test` runs a sample of: transcripts, Nexmark (about 15 minutes)
	@$(PYTHON_IN_VENV) -m pytest -m spark_all $(PYTEST_ARGS)

soak: java $(INSTALLED) ## Inject faults for MINUTES=30, again and again; figures in build/soak/report.json
	@$(PYTHON_IN_VENV) -m millpond.testing.soak --minutes $(MINUTES)

SUPERSTEPS ?= 1000000
soak-year: $(INSTALLED) ## Let a store live through a year of SUPERSTEPS=1000000 (hours; goes on where it was stopped)
	@$(PYTHON_IN_VENV) -m benchmarks.year --supersteps $(SUPERSTEPS) --folder build/soak --json build/soak/year.json

check: types ## Lint, formatting, types, spelling, and the repository's own rules
	$(PYTHON_IN_VENV) -m ruff check --output-format concise .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m codespell_lib
	$(PYTHON_IN_VENV) -m pytest -q tests/test_tidy.py

coverage: java $(JARS) ## Run all tests and measure which branches they take; build/coverage/html/index.html (about 30 minutes)
	@rm -rf build/coverage && mkdir -p build/coverage/data
	@$(PYTHON_IN_VENV) -m coverage run -m pytest -n $(PROCESSES) -m "not spark_all and not untraced" $(PYTEST_ARGS)
	@$(PYTHON_IN_VENV) -m coverage combine --quiet
	@$(PYTHON_IN_VENV) -m coverage json --quiet -o build/coverage/report.json
	@$(PYTHON_IN_VENV) -m coverage html --quiet -d build/coverage/html
	@$(PYTHON_IN_VENV) -m tests.coverage_by_room

hooks: $(INSTALLED) ## Have git run these checks before each commit
	$(PYTHON_IN_VENV) -m pre_commit install

# --verifytypes fails below 100 %. It does not follow the import hook of an editable install, so it finds the package
# on PYTHONPATH, and it ignores --pythonpath, so it finds the locked packages by the `python` on PATH.
types: $(INSTALLED) ## Check types: mypy strict, and that pyright knows the type of every public symbol
	$(PYTHON_IN_VENV) -m mypy --strict -p millpond
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" PYTHONPATH=$(CURDIR) $(PYTHON_IN_VENV) -m basedpyright \
	    --verifytypes millpond --ignoreexternal

format: $(INSTALLED) ## Put the code into its format and mend what ruff can mend
	$(PYTHON_IN_VENV) -m ruff check --fix-only .
	$(PYTHON_IN_VENV) -m ruff format .

docs: $(INSTALLED) ## Build the documentation as a site in build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --clean

bench: java $(JARS) ## Measure against Spark's transformWithState; figures in build/bench/throughput.json
	@mkdir -p build/bench
	@$(PYTHON_IN_VENV) -m benchmarks.throughput --json build/bench/throughput.json

bench-cache: $(INSTALLED) ## Measure what eviction policies cost, by the memory that there is (about 20 minutes); build/bench/cache.json
	@$(PYTHON_IN_VENV) -m benchmarks.cache --json build/bench/cache.json --picture build/bench/cache.png

bench-scale-out: java $(JARS) ## Measure what Spark's executors cost (about 25 minutes); build/bench/scale_out.json
	@$(PYTHON_IN_VENV) -m benchmarks.scale_out --json build/bench/scale_out.json

bench-state-size: java $(JARS) ## Measure state larger than memory; build/bench/state_size.json
	@$(PYTHON_IN_VENV) -m benchmarks.state_size --json build/bench/state_size.json

bench-rebalance: java $(JARS) ## Measure a hot range that wanders; build/bench/rebalance.json and a picture (about 6 minutes)
	@$(PYTHON_IN_VENV) -m benchmarks.rebalance --json build/bench/rebalance.json --picture build/bench/rebalance.png

bench-routing: java $(JARS) ## Measure finding the interval of each record; build/bench/routing.json
	@$(PYTHON_IN_VENV) -m benchmarks.routing --json build/bench/routing.json

bench-disk-tier: $(INSTALLED) ## Measure reads through the disk tier, of a store that takes 20 ms longer; build/bench/disk_tier.json
	@$(PYTHON_IN_VENV) -m benchmarks.disk_tier --latency-ms 20 --json build/bench/disk_tier.json

bench-driver: $(INSTALLED) ## Measure the driver's part of a superstep, by the number of intervals; build/bench/driver.json
	@$(PYTHON_IN_VENV) -m benchmarks.driver --json build/bench/driver.json

bench-load: $(INSTALLED) ## Measure making rows of a table; build/bench/load.json
	@$(PYTHON_IN_VENV) -m benchmarks.load --json build/bench/load.json

bench-requests: $(INSTALLED) ## Count requests to an object store, by the age of the store; build/bench/requests.json
	@$(PYTHON_IN_VENV) -m benchmarks.requests --versions 317 --versions 10000 --json build/bench/requests.json

bench-anatomy: java $(JARS) ## Measure where the time of a superstep on Spark goes, and draw it (about 5 minutes); build/bench/anatomy.json
	@$(PYTHON_IN_VENV) -m benchmarks.anatomy --json build/bench/anatomy.json --picture build/bench/anatomy.png

bench-nexmark-sql: java $(JARS) ## Measure Nexmark's queries beside Spark's own SQL (about 8 minutes); build/bench/nexmark_sql.json
	@$(PYTHON_IN_VENV) -m benchmarks.nexmark_sql --json build/bench/nexmark_sql.json

bench-spark-latency: java $(JARS) ## Measure a thousand records a second beside Spark's own state (about 3 minutes); build/bench/spark_latency.json
	@$(PYTHON_IN_VENV) -m benchmarks.spark_latency --json build/bench/spark_latency.json

bench-peers: java $(JARS) ## Measure windowed sums beside Spark's own, Pathway, Bytewax and Polars (about 12 minutes); build/bench/peers.json
	@$(PYTHON_IN_VENV) -m benchmarks.peers --json build/bench/peers.json --picture build/bench/peers.png

SEEDS ?= 2000
simulate: $(INSTALLED) ## Simulate the whole engine under faults, on all processors (SEEDS=2000: about 11 minutes on 2)
	@$(PYTHON_IN_VENV) -m millpond.testing.simulate --seeds $(SEEDS) --json build/simulation.json

setup: java $(JARS) ## Only set up: .venv, the locked packages, Delta's jars

lock: ## Update every pin in requirements.lock, as pyproject.toml allows
	@.ci/lock --upgrade

clean: ## Remove build results and caches (rm -rf .venv for the environment)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse metastore_db derby.log
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

java:
	@.ci/need-java

$(MADE): .ci/find-python
	@python=$$(.ci/find-python) && echo "Making $(VENV) with $$python …" && "$$python" -m venv --clear $(VENV)
	@touch $@

$(INSTALLED): $(MADE) requirements.lock pyproject.toml
	@echo "Installing the locked packages (about 650 MB to fetch the first time) …"
	@$(PYTHON_IN_VENV) -m pip install --require-hashes -r requirements.lock
	@$(PYTHON_IN_VENV) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Classes as Java maps them into memory: tests start Spark some twenty times, and ZooKeeper more than a hundred times.
# Java ignores another Java's archive. With Spark's comes a Spark that has Delta's jars.
$(CLASSES): build/%-classes.jsa: $(JARS) tests/%_classes.py
	@mkdir -p build && echo "Archiving classes of $*, so that tests start it faster …"
	@$(PYTHON_IN_VENV) -m tests.$*_classes 2>build/$*-classes.log || { cat build/$*-classes.log; exit 1; }

$(JARS): $(INSTALLED)
	@$(PYTHON_IN_VENV) -m millpond.cli.jars --s3
	@touch $@
