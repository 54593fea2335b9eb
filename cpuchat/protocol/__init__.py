"""Messages between the app and a worker: commands, events, timings and facts of a model."""
