"""Answers that have to fit a JSON Schema: found in the text of a model, checked, and returned for a repair."""
