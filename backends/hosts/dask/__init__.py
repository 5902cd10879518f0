"""Hosts that are the workers of a Dask cluster. The only importer of distributed."""
