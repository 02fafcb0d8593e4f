# The one runner, for developers and CI alike. Every target sets up what it needs; the second time
# that needs no network.
#
#   PYTHON=python3.12 make serve    another interpreter (3.11 or newer)
#   make test ARGS="-k lifecycle"   arguments for pytest

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
OLDEST := .venv-oldest
REFERENCE := .venv-reference
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Bytecode is written by whoever first imports a module: pip would compile all there are, one after the other, for
# longer than the rest of its work takes. Where it is not written, each of a dozen processes compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

# What an extra asks for, a line each: behind a Python. And installed without another look at all that is there,
# which takes 20 seconds.
requirements_of = -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]], sep="\n")' $(1)
extra = $(PY) $(call requirements_of,$(1)) | \
	$(PY) -m pip install --quiet --no-compile -c constraints.txt -r /dev/stdin

CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve serve-many site test test-all test-page test-clients test-oldest reference-quantization gpu check fmt clean

help:
	@echo 'make serve   serve the demo model on http://127.0.0.1:8000 (Ctrl-C stops it)'
	@echo 'make serve-many  eight models on a card with room for three, likewise'
	@echo 'make test    the tests that need no GPU and are quick'
	@echo 'make test-all  all that need no GPU: three quarters of an hour on two cores'
	@echo 'make test-clients  what other people wrote: OpenAI, Anthropic, schemathesis, evalscope; 1.3 GB in .venv-clients'
	@echo 'make test-oldest  the unit tests with the oldest versions that pyproject.toml allows, in .venv-oldest'
	@echo 'make reference-quantization  our reading of quantised weights against the packages of their formats; 3 GB in .venv-reference'
	@echo 'make test-page  the status page in a browser; needs chromium'
	@echo 'make site    the documentation as a site, in site/'
	@echo 'make gpu     the tests that need one; PY=python3: with that interpreter, installing nothing'
	@echo 'make check   formatting, lint, types, the direction of imports'
	@echo 'make fmt     format, and fix what lint can fix'
	@echo 'make clean   remove the environment, the caches and what tests wrote to checkpoints/'

serve: $(STAMP)
	@exec $(VENV)/bin/sleepserve serve serve_config.yaml

# Warnings are errors: a link that leads nowhere, a page that nobody finds.
site: $(STAMP)
	@$(PY) -c 'import material' 2>/dev/null || { $(call extra,site); }
	$(PY) -m mkdocs build --strict --site-dir site

serve-many: $(STAMP)
	@exec $(VENV)/bin/sleepserve serve configs/many.yaml

# In a process per core, but for those that need the machine to themselves. With arguments, as one command.
test: NOT = gpu or slow or browser
test-all: NOT = gpu or browser
test test-all: $(STAMP)
ifdef ARGS
	$(PY) -m pytest -m "not ($(NOT))" $(ARGS)
else
	$(PY) -m pytest -m "not (alone or $(NOT))" --numprocesses auto --maxprocesses 4 --dist worksteal tests/unit tests/integration
	$(PY) -m pytest -m "alone and not ($(NOT))" tests/integration tests/e2e
endif

# With Debian's chromium: playwright would have to download its own.
test-page: $(STAMP)
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
		echo 'make test-page needs a browser. Debian, Ubuntu: apt-get install chromium' >&2; exit 1; }
	@$(PY) -c 'import playwright' 2>/dev/null || { $(call extra,page); }
	$(PY) -m pytest -m browser $(ARGS) tests/browser
	@echo 'Pictures of the page: .pytest_cache/page'

# Clients in an environment without the server's packages; they start a server of the other one.
test-clients: $(STAMP) $(CLIENTS)/.installed
	SERVER_PYTHON=$(CURDIR)/$(PY) $(CLIENTS)/bin/python -m pytest tests/clients --confcutdir tests/clients \
		-W default $(ARGS)

# uv finds the versions. Those of what our dependencies need are today's.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not (gpu or slow)" $(ARGS) tests/unit

reference-quantization: $(REFERENCE)/.installed
	PYTHONPATH=$(CURDIR) $(REFERENCE)/bin/python tests/reference/quantization.py

# `make gpu PY=python3` takes that interpreter as it is: a GPU host often has no registry, but all that
# these tests need. Only modules with the mark are imported; others may need what is not there.
# Some have their mark from `cases`. Most of them run side by side: time on a card is dear.
of_card = $$(grep -rlE 'mark\.gpu|OF_CARD' $(1) --include='test_*.py' | sort)

gpu: $(if $(filter command line,$(origin PY)),,$(STAMP))
ifdef ARGS
	$(PY) -m pytest -m gpu $(ARGS) $(call of_card,tests)
else
	$(PY) -m pytest -m "gpu and not alone" -p no:benchmark --numprocesses 5 --dist worksteal $(call of_card,tests/unit tests/integration)
	$(PY) -m pytest -m "gpu and alone" $(call of_card,tests)
endif

check: $(STAMP)
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo

fmt: $(STAMP)
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

clean:
	rm -rf $(VENV) $(CLIENTS) $(OLDEST) $(REFERENCE) checkpoints/demo checkpoints/tiny .mypy_cache .hypothesis .pytest_cache .ruff_cache
	find actors serve_app tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python that has a CUDA build of torch keeps it (a GPU image brings its own). Without any torch
# and without an NVIDIA driver, PyTorch's CPU index spares 3 GB of CUDA libraries, where it can be
# reached: https://pytorch.org/get-started/locally/ A CUDA build of torch brings its own Triton.
$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "sleepserve needs Python 3.11 or newer; found none. Say PYTHON=/path/to/python3.12 make ..." >&2; \
		exit 1; fi
	@cuda=$$($(PYTHON) -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null); \
	site=; extras=dev; index=; \
	if [ -n "$$cuda" ]; then site=--system-site-packages; fi; \
	if [ -n "$$cuda" ] || command -v nvidia-smi >/dev/null; then extras=dev,gpu; \
	elif $(PYTHON) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=3)' 2>/dev/null; \
	then index="--extra-index-url $(CPU_INDEX)"; fi; \
	echo "Installing into $(VENV): a minute or two, once."; \
	set -ex; \
	test -x $(PY) || $(PYTHON) -m venv $$site $(VENV); \
	$(PY) -m pip install --quiet --no-compile -c constraints.txt $$index -e ".[$$extras]"; \
	if [ -z "$$($(PY) -c 'import torch; print(torch.version.cuda or "")')" ]; then \
		$(call extra,cpu); fi
	@touch $@

# A torch of PyTorch's CPU index where that can be reached, as above; UV_TORCH_BACKEND, UV_FIND_LINKS and
# UV_CONSTRAINT say otherwise. Where there is no card, Triton's interpreter runs the kernels, and that of 3.6, which
# a CUDA build of torch 2.11 asks for, cannot: it makes loop bounds by int() of an array of one dimension
# (triton/runtime/interpreter.py, _patch_lang_tensor), of which NumPy warns, and which 2.4 refuses. So the
# extra's Triton replaces it.
$(OLDEST)/.installed: pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "needs Python 3.11 or newer; found none" >&2; exit 1; fi
	@echo "Installing the oldest allowed versions into $(OLDEST): a minute or two."
	@rm -rf $(OLDEST)
	@set -e; \
	$(PYTHON) -m venv $(OLDEST); \
	$(OLDEST)/bin/python -m pip install --quiet uv; \
	if $(PYTHON) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=3)' 2>/dev/null; \
	then export UV_TORCH_BACKEND=$${UV_TORCH_BACKEND:-cpu}; fi; \
	install="$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct"; \
	$$install -e ".[dev]"; \
	if ! $(OLDEST)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$$install --no-deps "$$($(OLDEST)/bin/python $(call requirements_of,cpu))"; fi
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
	@if [ -z "$(PYTHON)" ]; then echo "needs Python 3.11 or newer; found none" >&2; exit 1; fi
	@echo "Installing into $(CLIENTS): some minutes, once."
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	@touch $@

# Without a CUDA build of torch where PyTorch's CPU index can be reached. The packages build no extensions.
$(REFERENCE)/.installed: tests/reference/requirements.txt tests/reference/packages.txt
	@if [ -z "$(PYTHON)" ]; then echo "needs Python 3.11 or newer; found none" >&2; exit 1; fi
	@echo "Installing into $(REFERENCE): some minutes, once."
	@test -x $(REFERENCE)/bin/python || $(PYTHON) -m venv $(REFERENCE)
	@index=; \
	if $(PYTHON) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=3)' 2>/dev/null; \
	then index="--extra-index-url $(CPU_INDEX)"; fi; \
	set -e; \
	$(REFERENCE)/bin/python -m pip install --quiet $$index -r tests/reference/requirements.txt; \
	BUILD_CUDA_EXT=0 $(REFERENCE)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		-r tests/reference/packages.txt
	@touch $@
