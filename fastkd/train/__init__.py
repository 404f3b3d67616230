"""The training library behind the command: data, models, the loop, saving and resuming."""
