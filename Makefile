# make demo       the product's main job on real input, ending with a report
# make test       every gate and the fast tests
# make test-all   the slow tests too
# make lint       format, lint, types, walls, module sizes
# make bench      the measurements behind BENCHMARKS.md
# make posix      pjdfstest from a folder where it is built: make posix PJDFSTEST=DIR
# make model      train the tiny vision-language model again
#
# The first call makes .venv and installs what is missing; later calls start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2
BENCHES := training curriculum attention offload archive_media fuse tco
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-all posix lint bench model clean system-demo system-test
.DELETE_ON_ERROR:

demo: $(STAMP) system-demo
	$(BIN)/tierwise demo

test: lint system-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-all: lint system-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "slow or not slow"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/module_sizes.py

bench: $(STAMP) system-test
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py || exit 1; done
	$(BIN)/python bench/to_markdown.py

posix: $(STAMP)
	$(BIN)/python tests/archive/fuse/run_pjdfstest.py $(PJDFSTEST)

model: $(STAMP)
	$(BIN)/python -m tierwise.curriculum.tiny.train --out src/tierwise/curriculum/tiny/weights

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tierwise needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "cannot make a virtual environment; run: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

# System packages: installed with apt-get when that is allowed, otherwise named in one line.
# The demo needs none as root (the library-call path needs none at all); fuse3 lets others mount,
# libisal2 makes parity faster. The tests read disc images with other people's programs and
# open the report in a browser.
system-demo:
	@.ci/system_packages fuse3:fusermount3 libisal2:libisal.so.2

system-test: $(STAMP)
	@.ci/system_packages fuse3:fusermount3 libisal2:libisal.so.2 attr:setfattr \
	  p7zip-full:7z libarchive-tools:bsdtar xorriso:xorriso rsync:rsync chromium:chromium
