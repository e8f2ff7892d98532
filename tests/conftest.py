"""What holds for every test: signals do what they do at a prompt."""

import signal

# A shell ignores SIGINT and SIGQUIT for what it starts in the background, `nohup` SIGHUP, and child
# processes inherit that: tests that interrupt a server would wait for ever.
for _number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
