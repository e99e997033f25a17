"""For all tests: Ctrl+C means what it means at a terminal, also where they run in the background."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job's; every process started here would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
