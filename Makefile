# Needs Python 3.10 or newer and make; everything else goes into .venv.
#
#   make test PYTHON=python3.12                    another interpreter
#   make test PYTEST_ARGS="-k packaging -n 0"      some tests, in one process
#   make test TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"
#                                                  where PyPI's torch is a CUDA build

PYTHON ?= python3
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
READY := .venv/ready
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# What a developer has exported must not change what the tests see.
unexport PYTHONPATH PPTRACE PPTRACE_DIR PPTRACE_RING_SLOTS PPTRACE_HANG_AFTER
unexport PPTRACE_EMULATE PPTRACE_EMULATE_HOST PPTRACE_RULE PPTRACE_EAGER
unexport PPTRACE_REPORT PPTRACE_FIX
# Several ranks share the cores: one thread each.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint full torch-schedules chaos differential bench clean

help:  ## this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | \
	  while IFS='|' read -r goal text; do printf '%-22s %s\n' "$$goal" "$$text"; done

demo: $(READY)  ## a pipeline that hangs, what pptrace says, and the fixed one
	$(PY) examples/demo.py

# loadscope: fixtures of a module, runs of real ranks among them, are set up once.
test: $(READY)  ## all tests that CI runs
	$(PY) -m pytest -n $(WORKERS) --dist loadscope $(PYTEST_ARGS)

# mypy looks at an installed copy: in the tree it finds ./pptrace alone, without hooks
# and viewers, and reports success. The count at the end holds it to all files.
lint: $(READY)  ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	@rm -rf build
	@$(PIP) install -q --no-deps --no-build-isolation --target build/types .
	@cd build/types && \
	"$(if $(filter /%,$(PY)),$(PY),$(CURDIR)/$(PY))" -m mypy -p pptrace \
	  --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
	  | tee ../mypy.txt; grep -q '^Success' ../mypy.txt
	@files=$$(find pptrace hooks viewers -name '*.py' | wc -l); \
	grep -q " $$files source files" build/mypy.txt || \
	{ echo "mypy did not check all $$files files of pptrace, hooks and viewers"; exit 1; }

full: $(READY)  ## 1F1B for every S, n, rule and metadata mode; writes docs/full.md
	$(PY) tests/full.py

torch-schedules: $(READY)  ## all of torch's schedules beside the checker; writes its page in docs
	$(PY) tests/torch_schedules.py

chaos: $(READY)  ## SIGKILL one rank at a hundred random moments, check each report
	$(PY) tests/chaos.py --runs 100

differential: $(READY)  ## 2,000 random programs: the checker against emulated runs
	$(PY) tests/differential.py --programs 2000

bench: $(READY)  ## measurements with a bar to meet
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/checker.py

clean:  ## remove what was built and cached; .venv and pptrace-out stay
	rm -rf build dist pptrace.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The file `ready` is written last and holds the folder it was made in, so a half-made
# .venv, or one in a tree that was moved or copied (an editable install has absolute
# paths), is made anew. A changed pin only updates it.
ifneq ($(shell $(PY) -ISc "print(open('$(READY)').read())" 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
FRESH := yes
endif

$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "pptrace needs Python 3.10 or newer: make PYTHON=python3.x"; exit 2; }
	@rm -f $@
	$(if $(FRESH),$(PYTHON) -m venv --clear .venv)
	$(PIP) install $(TORCH_PIP_ARGS) torch==$(TORCH)
	$(PIP) install -q -r constraints.txt
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@printf '%s' "$(CURDIR)" > $@
