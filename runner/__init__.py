"""Runs of a DAG: planned, executed, stored, resumed, looked at. The public names are those of `plait`."""
