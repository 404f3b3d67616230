"""`python -m bench.studies.without_similarities study ...`: fastkd, whose runs compute no RCCC."""

from fastkd import __main__ as entry
from fastkd.study import grid_runs

grid_runs.similarities = lambda run, student: {}

if __name__ == "__main__":
    entry.main()
