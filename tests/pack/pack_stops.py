"""Ends work on packs right after one of its own steps, and says what is there by then."""

import pytest
from small_moe import MIXED, convert, flip, make_small_moe

from tieredmoe.pack.journal import JOURNAL_NAME
from tieredmoe.pack.reclaim import GivenUp
from tieredmoe.pack.work_place import WorkPlace

NOTE, TAKE, PUBLISH = (WorkPlace, "note"), (GivenUp, "take"), (WorkPlace, "publish")


class StoppedHereError(Exception):
    pass


def moe(directory, **options):
    directory.mkdir(exist_ok=True)
    options = {"types": MIXED[1:], "n_experts": 4, "n_shards": 2} | options
    return make_small_moe(directory / "m.gguf", **options)


def stopped(model, dest, monkeypatch, function, *, n=0, work=convert, **options):
    """Conversion that ends right after call ``n`` of a method of ours."""
    cls, name = function
    real, calls = getattr(cls, name), iter(range(1000))

    def stopping(*arguments):
        result = real(*arguments)
        if next(calls) == n:
            raise StoppedHereError
        return result

    with monkeypatch.context() as patch:
        patch.setattr(cls, name, stopping)
        with pytest.raises(StoppedHereError):
            work(model, dest, **options)


def journal_of(dest):
    return dest.with_name(f"{dest.name}.partial") / JOURNAL_NAME


def last_line_spoilt(dest):
    journal = journal_of(dest)
    lines = journal.read_bytes().splitlines(keepends=True)
    flip(journal, sum(map(len, lines[:-1])) + 40)
