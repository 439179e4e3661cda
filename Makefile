# Every target makes what it needs, in .venv, from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types audit format bench image-test lock clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

$(STAMP): pyproject.toml setup.py constraints.txt deploy/check-machine.sh $(wildcard export/bundle/native/* service/native/*)
	@PYTHON="$(PYTHON)" sh deploy/check-machine.sh
	@echo "Installing bidmatch with its training and test packages into $(VENV) (some minutes: torch is large,"
	@echo "the searches and hnswlib are compiled) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[train,dev]'
	@touch $@

install: $(STAMP)  ## make .venv and install everything into it

demo: $(STAMP)  ## simulate a click log, train, export, serve, match; leaves runs/demo/
	@$(BIN)/bidmatch demo --out runs/demo

test: $(STAMP)  ## run the whole test suite
	@. deploy/test-tools.sh && $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(STAMP)  ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	@$(BIN)/mypy

audit: $(STAMP)  ## look the dependencies up among known vulnerabilities
	@$(BIN)/python deploy/audit.py constraints.txt .audit

format: $(STAMP)  ## rewrite the code in ruff's format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(STAMP)  ## measure training cost against the number of labels, on a quiet machine
	@$(BIN)/python -m bench.training

image-test:  ## build the images, bring compose.yaml up, call it, take it down; needs Docker
	@$(PYTHON) deploy/image_test.py

lock: $(STAMP)  ## write constraints.txt anew from what .venv holds
	@sh deploy/lock.sh $(BIN)/python > constraints.txt.new && mv constraints.txt.new constraints.txt

clean:  ## remove .venv, .peers, caches and build folders; runs/ stays
	rm -rf $(VENV) .peers .audit build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
