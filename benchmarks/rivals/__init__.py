"""One script a side, each run in an environment of its own by `benchmarks/rivals.py`."""
