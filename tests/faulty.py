"""What ends a process, stops it, or finds the disk full, right before a call on a path; as source for processes that tests start."""

AT = """
import errno, fnmatch, itertools, os


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
"""
"""`at(call, pattern, number, what)`: before the call of `os` on the path of that number, a signal or "full"."""
