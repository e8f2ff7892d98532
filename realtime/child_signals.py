"""Ctrl-C and SIGTERM in the server's own processes: they go to the whole process group, and are the
server's, which drains and then ends these processes."""

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

_OURS = (signal.SIGINT, signal.SIGTERM)


def start_deaf(process: BaseProcess) -> None:
    """Start a process of `spawn` that hears neither while it imports; its main function begins with
    `ignore_signals`."""
    resource_tracker.ensure_running()  # the first start would do it, and unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)  # which a new process inherits
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Both, and whatever of them has come meanwhile; no longer blocked, which children inherit."""
    for number in _OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
