"""Stores: where plait writes down what it does."""
