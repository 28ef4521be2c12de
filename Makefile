# Every target creates what it needs in .venv; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format docs clean

demo: $(STAMP)  ## train the parabola with TensorFlow on four workers
	$(BIN)/instep demo

# Without restarts: after one, the tests that are left would wait for ever.
test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	    --max-worker-restart=0

check: $(STAMP)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## put the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The maker of the theme announces a successor at every build; that is no warning of ours.
docs: $(STAMP)  ## build the documentation into the folder site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)
