"""What every test may rely on."""

import signal


def pytest_configure():
    """Ctrl-C works, though a shell that starts tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
