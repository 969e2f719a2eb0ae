"""The time of a step against its floor, in virtual time: serial, overlapped, and with prefetch.

    python benchmarks/overlap.py [--ssd 5,12,14] [--hits 0.3,0.54,0.9] [--recall 0.75]

The production tiers, queues, ring, prefetcher and governor decode tokens of DeepSeek-V4-Flash's
sizes (43 layers of 256 experts, top-6, 13.37 MB each; a device behind 50 GB/s) on a simulated disk,
for 5 to 340 ms of computing a token. Prints one line per disk, hit rate and computing time:
milliseconds per token of the three flows, each as a multiple of the floor, which is the slowest of
the disk, the copies and the computing alone; and with prefetch over without. Marked where it is
over the limit: 1.15 where computing takes less than a quarter or more than four times what the disk
takes, 1.45 in between, and 1.01 times the time without prefetch. The same numbers on any machine.
"""

from __future__ import annotations

import argparse
from itertools import product

from tieredmoe.testing.decoding import Decoding, decode

GPU_MS = (5, 12, 40, 100, 340)
FAR = 4
LIMIT_FAR, LIMIT_NEAR, LIMIT_HARM = 1.15, 1.45, 1.01
HARM_GPU_MS_MAX = 100


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def line(ssd_gb_s: float, hit_rate: float, gpu_ms: float, recall: float) -> str:
    decoding = Decoding(
        ssd_nbytes_per_s=ssd_gb_s * 1e9, hit_rate=hit_rate, gpu_s=gpu_ms / 1e3, recall=recall
    )
    serial, plain, ahead = (
        decode(decoding, flow) for flow in ("serial", "overlapped", "prefetching")
    )
    apart = max(ahead.gpu_s / ahead.ssd_s, ahead.ssd_s / ahead.gpu_s)
    limit = LIMIT_FAR if apart > FAR else LIMIT_NEAR
    over_floor = ahead.step_s / ahead.floor_s
    over_plain = ahead.step_s / plain.step_s
    harmful = over_plain > LIMIT_HARM and gpu_ms <= HARM_GPU_MS_MAX
    times = "".join(
        f"{timing.step_s * 1e3:>8.1f}{timing.step_s / timing.floor_s:>6.2f}"
        for timing in (serial, plain, ahead)
    )
    return (
        f"{ssd_gb_s:>4g}{hit_rate:>6.2f}{gpu_ms:>5g}{ahead.ssd_s * 1e3:>7.1f}"
        f"{ahead.floor_s * 1e3:>7.1f}{times}{' !' if over_floor > limit else '  '}"
        f"{over_plain:>7.3f}{' !' if harmful else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ssd", type=floats, default=[5.0, 12.0, 14.0], help="GB/s")
    parser.add_argument("--hits", type=floats, default=[0.3, 0.54, 0.9], help="hit rates")
    parser.add_argument("--recall", type=float, default=0.75, help="of the look-ahead")
    arguments = parser.parse_args()
    print("GB/s  hits  GPU    SSD  floor  serial    x  overl.    x prefet.    x   over overlapped")
    for ssd, hits, gpu_ms in product(arguments.ssd, arguments.hits, GPU_MS):
        print(line(ssd, hits, gpu_ms, arguments.recall), flush=True)


if __name__ == "__main__":
    main()
