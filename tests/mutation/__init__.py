"""Mutation testing: `make mutants` plants small bugs in the modules that decide, and counts those that tests see."""
