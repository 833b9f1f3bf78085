# make test   lint and test              make demo   train on digits with two local workers
# make lint   lint only                  make docs   build the pages of docs/ into build/docs
# make clean  remove the environments and all caches
#
# make test-versions  test with the oldest TensorFlow and Keras that are supported
#
# PYTHON=python3.12 make test  picks the interpreter that makes .venv (3.10 to 3.13).

PYTHON ?= python3
VENV := .venv
OLDEST_VENV := .venv-oldest
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_DIR := runs/demo

.DEFAULT_GOAL := help
.PHONY: help test test-versions lint docs demo clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

$(INSTALLED): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "tf_largebatch needs Python 3.10 to 3.13, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"choose another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing tf_largebatch and what its tests and examples need ..."
	@# An older pip, as some Pythons come with, takes minutes to choose versions.
	@$(BIN)/python -m pip install -qq --upgrade pip
	@# pip compiles on one core; what is left uncompiled would be compiled at each import where
	@# PYTHONDONTWRITEBYTECODE is set. A file that does not compile is of no use to us.
	@$(BIN)/python -m pip install -qq --no-compile -e '.[examples,test]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# What measures time has the machine to itself; the rest shares it, file by file.
RUN_TESTS = $(1)/python -m pytest -q -m alone && \
	$(1)/python -m pytest -q -m "not alone" --numprocesses=3 --dist=loadfile

test: lint
	$(call RUN_TESTS,$(BIN))

# make test has the newest ones. TensorFlow 2.18 ends at Python 3.12.
test-versions:
	@test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	@$(OLDEST_VENV)/bin/python -m pip install -qq --upgrade pip
	@$(OLDEST_VENV)/bin/python -m pip install -qq -e '.[examples,test]' 'tensorflow==2.18.*' 'keras==3.10.*'
	$(call RUN_TESTS,$(OLDEST_VENV)/bin)

docs: $(INSTALLED)
	$(BIN)/python -m mkdocs --quiet build --strict

demo: $(INSTALLED)
	@rm -rf $(DEMO_DIR)
	$(BIN)/python tools/launch_local_cluster.py --workers=2 --log_dir=$(DEMO_DIR)/logs -- \
		$(BIN)/python examples/train.py --dataset=mnist5k --model=resnet_small --epochs=8 \
		--decay_epochs=5,7 --run_dir=$(DEMO_DIR)
	@$(BIN)/python -c 'import json; summary = json.load(open("$(DEMO_DIR)/summary.json")); \
		print("Validation accuracy {final_val_accuracy:.2%}".format(**summary))'
	@echo "Plots are in $(DEMO_DIR)/plots"

clean:
	rm -rf $(VENV) $(OLDEST_VENV) runs build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
