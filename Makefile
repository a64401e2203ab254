# Run inside a virtual environment.
.PHONY: dev check test bench baseline

dev:  ## an editable install with everything for working on edgellm
	pip install -e '.[dev]'

check:  ## style and types
	ruff check .
	mypy

test:  ## the fast tests, then the slow ones; those that need absent models or vectors say so
	pytest
	pytest -m slow

baseline:  ## measure what `edgellm bench --compare` compares with: make baseline MODELS=model.gguf
	for model in $(MODELS); do edgellm bench $$model --save benchmarks/baseline.json; done

bench:  ## speed beside llama.cpp (needs llama-cpp-python): make bench MODELS=model.gguf
	python benchmarks/peers.py --batch $(MODELS)
