"""Backends: what answers the prompts."""
