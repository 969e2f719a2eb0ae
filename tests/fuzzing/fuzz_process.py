"""``python fuzz_process.py N SEED TARGET...``: N inputs for each, in a gigabyte and little time.

Prints how many inputs each target accepted and refused. Fails with hypothesis's smallest example
when an input ends in anything but a right answer or an error of ours: a crash, a hang, too much
memory.
"""

import resource
import signal
import sys
from pathlib import Path

from fuzz_targets import OURS, targets
from hypothesis import HealthCheck, Phase, given, seed, settings

EXTRA_NBYTES = 1 << 30
SECONDS_MAX = 20


class HangError(Exception):
    """An input took too long."""


def main(n_inputs, start, names):
    with targets() as known:
        signal.signal(signal.SIGALRM, _hang)
        _limit_memory()
        for name in names:
            accepted, refused = _run(known[name], n_inputs, start)
            print(name, accepted, refused, flush=True)  # noqa: T201 (its result)


def _run(target, n_inputs, start):
    counts = {"accepted": 0, "refused": 0}

    @seed(start)
    @settings(
        max_examples=n_inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(target.strategy)
    def run(data):
        signal.alarm(SECONDS_MAX)
        try:
            target.check(data)
            counts["accepted"] += 1
        except OURS:
            counts["refused"] += 1
        finally:
            signal.alarm(0)

    run()
    return counts["accepted"], counts["refused"]


def _hang(*_):
    raise HangError


def _limit_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
