"""The papers' losses between features: one file for each loss, with its reference beside it."""
