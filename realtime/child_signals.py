"""Ctrl-C and SIGTERM in the server's own processes: they go to the whole process group, and are the
server's, which drains and then ends these processes."""

import signal
import threading
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

_OURS = (signal.SIGINT, signal.SIGTERM)


def start_deaf(process: BaseProcess) -> None:
    """Start a process of `spawn` that hears neither while it imports; its main function begins with
    `ignore_signals`. A signal that comes meanwhile is heard here afterwards: half started, the process
    would complain."""
    resource_tracker.ensure_running()  # the first start would do it, and unblock the signals
    held: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)  # which a new process inherits
    # Threads of libraries do not block them, and what they take is handled on the main thread.
    handlers = [
        signal.signal(number, lambda number, _: held.append(number)) if is_main else None
        for number in _OURS
    ]
    try:
        process.start()
    finally:
        for number, handler in zip(_OURS, handlers, strict=True):
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held:
            signal.raise_signal(held[0])


def ignore_signals() -> None:
    """Both, and whatever of them has come meanwhile; no longer blocked, which children inherit."""
    for number in _OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
