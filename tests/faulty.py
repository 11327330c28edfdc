"""A process that imports once and works on each order in a child, which ends, stops or finds the disk full before a call on a path."""

SERVE = """
import errno, fnmatch, itertools, json, os, signal, sys, traceback


def at(call, pattern, number, what):
    act, count = getattr(os, call), itertools.count(1)

    def acted(*arguments, **options):
        path = os.readlink(f"/proc/self/fd/{arguments[0]}") if call == "fsync" else str(arguments[-1])
        if fnmatch.fnmatch(path, pattern) and next(count) == number:
            if what == "full":
                raise OSError(errno.ENOSPC, "no space left on device")
            os.kill(os.getpid(), what)
        return act(*arguments, **options)

    setattr(os, call, acted)


def serve(work):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(log, number)
            for event in order["events"]:
                at(*event)
            work(order)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
"""
"""Source of `serve(work)`: each line of standard input is an order, and the child's process id the answer.

Its `events` are (a call of `os`, a pattern of paths, the number of the call on such a path, a signal or "full").
"""
