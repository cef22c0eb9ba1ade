"""One run on disk and on the console: settings, plan, state, checkpoints, record, sinks, provenance."""
