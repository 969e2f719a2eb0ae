"""Crashes work on packs at its n-th system call, for every n, and lets it go on; run as a script.

A crash is a kill, which keeps what was written (half of the last write), or a power loss, which
also takes back whatever was not synced. Holes always stay: that is the worst for who makes them
early. Beside that, kills at random moments of the real thing, syncs included.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from tieredmoe.pack import (
    create_pack,
    holes,
    restore_pack,
    rollback_pack,
    source_files,
    stream_copy,
)
from tieredmoe.pack.journal import JOURNAL_NAME

STEPS = ("mkdir", "open", "ftruncate", "pwrite", "fdatasync", "fsync", "rename", "unlink", "rmdir")
CRASHED, FAILED = 9, 1


class Machine:
    """This process's calls to the system, counted, and ended at one of them."""

    def __init__(self, die_at, *, power_loss):
        self.n = 0
        self.die_at = die_at
        self.power_loss = power_loss
        self.real = {name: getattr(os, name) for name in STEPS}
        self.punch = holes.fallocate
        self.lock = threading.RLock()
        self.unsynced = []  # (plain descriptor, offset, bytes before, size before), oldest first
        self.plain = {}

    def install(self):
        for name in STEPS:
            setattr(os, name, self.step(name))
        holes.fallocate = self.step("fallocate")
        # What is kept open here, to take writes back, is no program that uses the source.
        source_files.refuse_if_open = lambda *_: None

    def step(self, name):
        act = getattr(self, f"do_{name}", None) or self.real.get(name)

        def stepped(*args, **kwargs):
            with self.lock:
                if self.n == self.die_at:
                    self.die(name, args)
                self.n += 1
                return act(*args, **kwargs)

        return stepped

    def die(self, name, args):
        if name == "pwrite":
            fd, data, offset = args
            self.remember(fd, offset, len(data))
            # A disk writes sectors whole, so a file's first four bytes are old or new.
            half = bytes(data[: len(data) // 2 if len(data) > 4 else 0])
            os.lseek(self.plain[os.fstat(fd).st_ino], offset, os.SEEK_SET)
            os.write(self.plain[os.fstat(fd).st_ino], half)
        if self.power_loss:
            for fd, offset, before, size in reversed(self.unsynced):
                self.real["pwrite"](fd, before, offset)
                self.real["ftruncate"](fd, size)
        os._exit(CRASHED)

    def remember(self, fd, offset, nbytes):
        inode = os.fstat(fd).st_ino
        if inode not in self.plain:
            self.plain[inode] = self.real["open"](f"/proc/self/fd/{fd}", os.O_RDWR)
        plain = self.plain[inode]
        before = os.pread(plain, nbytes, offset)
        self.unsynced.append((plain, offset, before, os.fstat(plain).st_size))

    def do_pwrite(self, fd, data, offset):
        self.remember(fd, offset, len(data))
        return self.real["pwrite"](fd, data, offset)

    def do_fdatasync(self, fd):
        # A kill is no power loss, and that is played here: syncing would only make this slow.
        plain = self.plain.get(os.fstat(fd).st_ino)
        self.unsynced = [entry for entry in self.unsynced if entry[0] != plain]

    do_fsync = do_fdatasync

    def do_fallocate(self, fd, mode, offset, nbytes):
        self.punch(fd, mode, offset, nbytes)


def in_child(work, die_at=None, *, power_loss=False):
    """Whether ``work`` ended (else it crashed), in a process of its own."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            stream_copy.N_READERS = stream_copy.N_WRITERS = 1
            stream_copy.WINDOW_NBYTES = 64 << 10
            Machine(die_at, power_loss=power_loss).install()
            asyncio.run(work())
            code = 0
        except BaseException:  # noqa: BLE001 (the child ends here, whatever it was)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, CRASHED}, f"ended with {code}"
    return code == 0


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def crash_everywhere(model, place, expected, *, reclaim, power_loss, then, steps):
    """One crash of a conversion per step, and what came of it; returns how many there were."""
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()}
    n_crashes = 0
    for die_at in steps:
        here = place / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(model, here / "model")
        source, dest = here / "model", here / "pack"
        create = lambda: create_pack(source, dest, reclaim_source=reclaim)  # noqa: B023, E731 (called in this round)
        ended = in_child(create, die_at, power_loss=power_loss)
        if not ended:
            n_crashes += 1
            # From the crash on, zeros must not pass for a model.
            for path in source.iterdir():
                data = path.read_bytes()
                assert data == before[path.name][0] or data[:4] == b"HOLE", (die_at, path)
        if then == "rollback" and not ended and not dest.exists():
            if (here / "pack.partial").exists():
                assert in_child(lambda: rollback_pack(dest)), die_at  # noqa: B023 (called at once)
            left = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
            assert left == before, f"{die_at}: the source is not as it was"
            assert sorted(path.name for path in here.iterdir()) == ["model"], die_at
            continue
        if not ended and (not dest.exists() or (dest / JOURNAL_NAME).exists()):
            assert in_child(create), die_at
        assert contents(dest) == expected, f"{die_at}: another pack than without the crash"
        if reclaim:
            assert not list(source.iterdir()), f"{die_at}: something is left of the source"
            assert in_child(lambda: restore_pack(dest, here / "back")), die_at  # noqa: B023 (called at once)
            restored = contents(here / "back")
            assert restored == {name: data for name, (data, _) in before.items()}, die_at
        else:
            left = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
            assert left == before, f"{die_at}: the source was changed"
        if ended:
            break
    return n_crashes


def crash_rollback(model, place, *, power_loss, stop_at, finish, first):
    """A conversion stopped late, its rollback crashed at every other step, then finished."""
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()}
    for die_at in range(first, 10_000, 2):
        here = place / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(model, here / "model")
        source, dest = here / "model", here / "pack"
        create = lambda: create_pack(source, dest, reclaim_source=True)  # noqa: B023, E731 (called in this round)
        assert not in_child(create, stop_at)
        ended = in_child(lambda: rollback_pack(dest), die_at, power_loss=power_loss)  # noqa: B023 (called at once)
        if not ended and (here / "pack.partial").exists():
            if finish == "create":
                assert in_child(create), die_at
                assert in_child(lambda: restore_pack(dest, here / "back")), die_at  # noqa: B023 (called at once)
                restored = contents(here / "back")
                assert restored == {name: data for name, (data, _) in before.items()}, die_at
                continue
            assert in_child(lambda: rollback_pack(dest)), die_at  # noqa: B023 (called at once)
        left = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
        assert left == before, f"{die_at}: the source is not as it was"
        if ended:
            return die_at
    raise AssertionError("it never ended")


def crash_restore(pack, place, expected, *, power_loss):
    """A restore crashed at every step, then finished."""
    for die_at in range(10_000):
        back = place / "back"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        ended = in_child(lambda: restore_pack(pack, back), die_at, power_loss=power_loss)  # noqa: B023 (called at once)
        if not ended and not back.exists():
            assert in_child(lambda: restore_pack(pack, back)), die_at  # noqa: B023 (called at once)
        found = contents(back)
        assert {name: found[name] for name in expected} == expected, die_at
        if ended:
            return die_at
    raise AssertionError("it never ended")


def kill_at_random(model, place, expected, *, n_kills, reclaim):
    """Kills of conversions after random times, each then finished or rolled back."""
    rng = random.Random(n_kills)
    originals = contents(model)
    n_inside = 0
    duration_s = None
    while n_inside < n_kills:
        here = place / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(model, here / "model")
        source, dest = here / "model", here / "pack"
        start_s = time.monotonic()
        child = os.fork()
        if child == 0:
            if duration_s is not None:
                # Nobody handles the alarm, so it ends the process like a kill, between any two
                # instructions.
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, duration_s))
            stream_copy.WINDOW_NBYTES = 8192
            asyncio.run(create_pack(source, dest, reclaim_source=reclaim))
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGALRM
        duration_s = duration_s or time.monotonic() - start_s
        n_inside += killed
        rng.random()
        if killed and n_inside % 3 == 0 and not dest.exists():
            if (here / "pack.partial").exists():
                asyncio.run(rollback_pack(dest))
            assert contents(source) == originals
            continue
        if not dest.exists() or (dest / JOURNAL_NAME).exists():
            asyncio.run(create_pack(source, dest, reclaim_source=reclaim))
        assert contents(dest) == expected
        asyncio.run(restore_pack(dest, here / "back"))
        assert contents(here / "back") == originals
        assert contents(source) == ({} if reclaim else originals)
    return n_inside


def main(arguments):
    work, model, place, expected = arguments[0], *map(Path, arguments[1:4])
    options = json.loads(arguments[4])
    place.mkdir()
    if work == "create":
        steps = range(*options.pop("steps", [10_000]))
        n = crash_everywhere(model, place, contents(expected), steps=steps, **options)
    elif work == "kill":
        n = kill_at_random(model, place, contents(expected), **options)
    elif work == "rollback":
        n = crash_rollback(model, place, **options)
    else:
        n = crash_restore(expected, place / "there", contents(model), **options)
    sys.stdout.write(f"{n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
