"""Trying variants of a profile on a host, one after the other, under one fixed load.

`variants.toml` says what there is to try, `variants.py` what of it this host, model and SGLang can use, `load.py` is
the load, `job.py` the job that launches, measures and stops.
"""
