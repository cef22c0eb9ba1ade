"""What holds for every test."""

import signal

# Where tests are started in the background of a shell, Ctrl-C is ignored, and so it would be in all
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
