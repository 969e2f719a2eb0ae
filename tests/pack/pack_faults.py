"""Makes one call of the operating system fail, or do something more."""

import os


def hook(monkeypatch, function, effect, *, at=0):
    """Call ``effect`` before call number ``at`` of ``os.function``; an exception replaces it."""
    real, calls = getattr(os, function), iter(range(1_000_000))

    def hooked(*args, **kwargs):
        if next(calls) == at:
            effect()
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, hooked)


def failing(code):
    def fail():
        raise OSError(code, os.strerror(code))

    return fail
