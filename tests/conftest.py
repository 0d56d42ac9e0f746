"""What every test may rely on."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every
# process they start; those tests are about Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
