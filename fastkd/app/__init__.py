"""The `fastkd` command: options, data, runs, saving, demo, doctor. No library code imports it."""
