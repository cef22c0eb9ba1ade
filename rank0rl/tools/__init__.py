"""The tools of `python -m rank0rl`: check, doctor, evaluate, export, play, plot, record, replay, report, verify."""
