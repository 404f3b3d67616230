"""Code shared by all losses: checks, numerics, dispatch, the registry. Nothing from a paper."""
