"""What holds for every test."""

import signal

# Where tests are started in the background of a shell, or under nohup, these are ignored, and so they
# would be in all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
