"""What every loss stands on: checks, numerics, dispatch, the registry; nothing of a paper."""
