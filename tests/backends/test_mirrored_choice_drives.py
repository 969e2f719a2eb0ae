"""A read of a mirror goes to the copy that will have it first."""

import asyncio

from mirror_stage import MS, PAGE, now, scenario

from tieredmoe.backends.mirror_copy import N_READS_UNASKED_MAX


@scenario({}, {})
async def test_copies_start_equal(mirror):
    await mirror.read(8)
    assert mirror.n_reads == [4, 4]
    mirror.check()


@scenario({"nbytes_per_s": PAGE / MS}, {"nbytes_per_s": 3 * PAGE / MS})
async def test_a_copy_three_times_as_fast_gets_three_times_as_much(mirror):
    for _round in range(50):
        await mirror.read(8)
    slow, fast = mirror.n_reads
    assert 2.5 < fast / slow < 3.5
    mirror.check()


@scenario({"nbytes_per_s": PAGE / MS}, {"nbytes_per_s": 3 * PAGE / MS})
async def test_a_batch_ends_on_both_copies_at_about_the_same_time(mirror):
    await mirror.read(40)
    begin = now()
    await mirror.read(40)
    assert now() - begin < 11 * MS, "ten pages on the slow one, thirty on the fast one"
    mirror.check()


@scenario({}, {})
async def test_a_copy_that_becomes_slow_gets_less(mirror):
    await mirror.read(100)
    mirror.disks[0]._nbytes_per_s /= 9
    for _round in range(400):
        await mirror.read(8)
    before = mirror.n_reads
    for _round in range(50):
        await mirror.read(10)
    shares = [after - n for after, n in zip(mirror.n_reads, before, strict=True)]
    assert shares[1] > 7 * shares[0]
    mirror.check()


@scenario({"nbytes_per_s": PAGE / MS / 100}, {})
async def test_a_copy_thought_slow_is_asked_now_and_then(mirror):
    for _one in range(2 * N_READS_UNASKED_MAX + 10):
        await mirror.read()
    slow, _fast = mirror.n_reads
    assert 2 <= slow <= 4
    mirror.check()


@scenario({"nbytes_per_s": PAGE / MS / 100, "queue_depth": 1}, {"queue_depth": 1})
async def test_a_copy_that_was_slow_once_is_not_slow_for_ever(mirror):
    await mirror.read(8)
    mirror.disks[0]._nbytes_per_s *= 100
    for _one in range(3 * N_READS_UNASKED_MAX):
        await mirror.read(2)
    before = mirror.n_reads
    await mirror.read(100)
    assert mirror.n_reads[0] - before[0] > 30
    mirror.check()


@scenario({}, {"nbytes_per_s": 10 * PAGE / MS})
async def test_a_read_repeated_into_its_memory_goes_to_another_copy(mirror):
    op = mirror.op()
    for n_reads in range(1, 5):
        await asyncio.gather(*mirror.backend.submit([op]))
        assert max(mirror.n_reads) == -(-n_reads // 2)
    mirror.check()
