"""Suites that every implementation of a protocol has to pass."""
