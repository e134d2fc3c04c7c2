# Set-up is part of every target: a fresh machine needs Python 3.11+, make and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
QUICK := tests/unit tests/contract

.PHONY: demo test check format bench proto wheel clean

# STRATEGY=sharded: two ranks that hold a part of the model each. STRATEGY=gather: three islands
# that publish into a bucket of an S3 server, which the demo starts.
STRATEGY ?= quickstart
demo: $(STAMP)
	$(BIN)/atoll demo examples/$(STRATEGY).toml

test: $(STAMP) lint
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests

check: $(STAMP) lint
	$(PYTEST) -q -n 2 --dist loadfile $(QUICK) -m "not s3 and not postgres"

# Seeds of simulated faults that `make storm` runs; `make test` has the first 500.
ATOLL_FIRST_SEED ?= 500
ATOLL_SEEDS ?= 2000

# What `make test` does in seconds, for the minute that it takes in the world.
.PHONY: storm
storm: $(STAMP)
	ATOLL_STORM_SECONDS=60 ATOLL_AWAY_SECONDS=60 ATOLL_CRASH_POINTS=0 ATOLL_DISK_POINTS=0 \
	  ATOLL_POWER_STATES=10000 ATOLL_STORM_KILLS=50 ATOLL_DAMAGE_FLIPS=24 \
	  ATOLL_GATHER_FALLS=0 ATOLL_GATHER_AWAY=10 ATOLL_WIDE_CONTRIBUTIONS=5000 ATOLL_FLOOD_LISTS=5 \
	  ATOLL_FLOOD_UNREAD=150 $(PYTEST) -q -m storm tests
	$(BIN)/atoll simulate --faults $(ATOLL_FIRST_SEED) --seeds $(ATOLL_SEEDS)
	$(BIN)/atoll simulate --faults $(ATOLL_FIRST_SEED) --seeds $(ATOLL_SEEDS) --strategy gather

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.codecs
	$(BIN)/python -m benchmarks.sync
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.control_plane
	$(BIN)/python -m benchmarks.restart
	$(BIN)/python -m benchmarks.parity
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.gather

proto: $(STAMP)
	cd src && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
	  --plugin=protoc-gen-mypy=../$(BIN)/protoc-gen-mypy --mypy_out=. atoll/wire/proto/transfer.proto

wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation

# Only pip with constraints.txt installs anything: a plain "torch" would take gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
