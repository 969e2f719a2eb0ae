"""Checks a pack against its digests, all of it or a sample, and names every damaged place."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.errors import ConfigError
from tieredmoe.pack.manifest import DIGEST_NBYTES, digest_of
from tieredmoe.pack.progress import PackProgress, Reporter, run_in_thread
from tieredmoe.pack.reader import Pack, open_pack
from tieredmoe.pack.spans import Span, SpanPart, SpanReader, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tieredmoe.pack.layout import Extent
    from tieredmoe.pack.manifest import Manifest
    from tieredmoe.pack.spans import Hasher
    from tieredmoe.spec import ExpertKey

NOT_ZERO = "is not zero"


@attrs.frozen
class Damage:
    """Bytes of a pack that are not what was converted; ``key`` says whose, if an expert's."""

    path: Path
    offset: int
    nbytes: int
    what: str
    fact: str
    key: ExpertKey | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what} ({self.nbytes:,} bytes at {self.offset:,}) {self.fact}"


@attrs.frozen
class VerifyReport:
    """The outcome of a verification: what was read is sound if ``damage`` is empty.

    Of ``n_parts`` (records, dense tensors, padding) ``n_read`` were read; all of them unless a
    sample was asked for. ``fallbacks`` say which files were read through the page cache.
    """

    read_nbytes: int
    damage: tuple[Damage, ...]
    total_nbytes: int
    n_read: int
    n_parts: int
    fallbacks: tuple[str, ...] = ()

    @property
    def share_found(self) -> float:
        """Damage to a larger share of the bytes would have been met with 95 % certainty.

        Each draw of a sample meets it with at least that probability: 1 - 0.05^(1/n).
        """
        return 0.0 if self.n_read == self.n_parts else 1 - 0.05 ** (1 / self.n_read)


async def verify_pack(
    path: Path | str,
    *,
    sample: int | None = None,
    seed: int | None = None,
    progress: Callable[[PackProgress], None] | None = None,
) -> VerifyReport:
    """Every byte of the pack's data files compared with its digest, all damage named.

    With ``sample`` only so many parts of it are read, chosen at random (by ``seed``, if given),
    larger ones rather: a minute instead of an hour. Direct reads, in 16 MiB of memory. Raises
    ``PackError`` for a pack that does not even open. Cancelling stops within a few records.
    """
    check_sample(sample)
    return await run_in_thread(partial(_verify, settled(path), sample, seed), progress)


def settled(path: Path | str) -> Path:
    """The path as it is now: the work goes on elsewhere while the working directory may change."""
    return Path(path).absolute()


def check_sample(sample: int | None) -> None:
    """Raise ``ConfigError`` unless ``sample`` is None or a number of parts."""
    if sample is not None and (isinstance(sample, bool) or sample < 1):
        raise ConfigError(f"sample is {sample!r}, it must be 1 or more parts, or None for all")


def verify_spans(
    files: Sequence[Path],
    spans: Callable[[], Iterator[Span]],
    reporter: Reporter,
    *,
    sample: int | None,
    seed: int | None,
    hasher: Callable[[], Hasher] | None = None,
) -> VerifyReport:
    """Compare ``spans`` of ``files``, or a sample of them; blocks. Raises ``PackError``.

    They are made twice and never held: those of a large model are a hundred megabytes.
    """
    sizes = np.fromiter((span.nbytes for span in spans()), np.int64)
    chosen = None if sample is None else sampled(spans(), sample, seed=seed)
    total = int(sizes.sum()) if chosen is None else sum(span.nbytes for span in chosen)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        reporter.report("verify", done_nbytes=done, total_nbytes=total)

    advance(0)
    with SpanReader(files, **({} if hasher is None else {"hasher": hasher})) as reader:
        damage = tuple(
            Damage(
                files[failure.span.file_index],
                failure.offset,
                failure.nbytes,
                failure.what,
                failure.fact,
                failure.span.key,
            )
            for failure in reader.failures(spans() if chosen is None else chosen, advance)
        )
        fallbacks = reader.fallbacks
    n_read = len(sizes) if chosen is None else len(chosen)
    return VerifyReport(total, damage, int(sizes.sum()), n_read, len(sizes), fallbacks)


@lru_cache
def zero_digest(nbytes: int) -> bytes:
    """The digest of so many zeros."""
    return digest_of(bytes(nbytes))


def record_spans(
    manifest: Manifest,
    locate: Callable[[ExpertKey], Extent],
    *,
    zero_padding: bool,
) -> Iterator[Span]:
    """Every record, in the order in which they lie; with ``zero_padding`` that is compared, too."""
    for key in sorted(manifest.layout.spec.keys(), key=locate):
        extent, layout = locate(key), manifest.layout.spec.layouts[key.layer]
        parts = [
            SpanPart(role.nbytes, digest, role.name)
            for role, digest in zip(layout.roles, manifest.role_digests(key), strict=True)
        ]
        padding = layout.stride - layout.payload_nbytes
        if padding and zero_padding:
            parts.append(SpanPart(padding, zero_digest(padding), "padding", NOT_ZERO))
        what = f"layer {key.layer}, expert {key.expert}"
        yield Span(extent.file_index, extent.offset, what, tuple(parts), key)


def dense_spans(manifest: Manifest, first_index: int) -> Iterator[Span]:
    """Everything that is not experts; dense files are counted from ``first_index``."""
    shards = zip(manifest.layout.shards, manifest.digests, strict=True)
    for index, (shard, digests) in enumerate(shards, first_index):
        offset = 0
        for segment, digest in zip(shard.segments, digests, strict=True):
            if segment.slabs is not None:
                continue
            assert len(digest) == DIGEST_NBYTES
            what = "padding" if offset else "header"
            if segment.tensor is not None:
                what = f"tensor {segment.tensor}"
            yield Span(index, offset, what, (SpanPart(segment.nbytes, digest),))
            offset += segment.nbytes


def _verify(path: Path, sample: int | None, seed: int | None, reporter: Reporter) -> VerifyReport:
    pack = open_pack(path)
    return verify_spans(
        pack.tensor_files, partial(_spans, pack), reporter, sample=sample, seed=seed
    )


def _spans(pack: Pack) -> Iterator[Span]:
    yield from record_spans(pack.manifest, pack.locate, zero_padding=True)
    yield from dense_spans(pack.manifest, len(pack.data_files))
