"""The `fastkd` command: a file a command, over `train` and `study`. No library code imports it."""
