"""A journal says what was done, whatever tore its end; damage and newer versions are named."""

import json

import pytest

from tieredmoe.errors import PackError
from tieredmoe.pack import journal as journal_module
from tieredmoe.pack.conversion_state import ConversionState
from tieredmoe.pack.journal import Journal, read_journal
from tieredmoe.pack.manifest import digest_of

RECORDS = [{"unit": 0, "state": "written", "digests": ["00" * 16]}, {"unit": 1, "state": "given"}]


def line(record):
    text = json.dumps(record).encode()
    return digest_of(text).hex().encode() + b" " + text + b"\n"


@pytest.fixture
def path(tmp_path):
    """A journal of a head and two records."""
    journal = Journal.create(tmp_path / "journal", {"work": "test"})
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return tmp_path / "journal"


def test_what_was_appended_is_read(path):
    records, nbytes = read_journal(path)
    assert records[1:] == RECORDS
    assert records[0]["work"] == "test"
    assert nbytes == path.stat().st_size


def test_a_journal_cut_at_any_byte_has_its_whole_records_and_goes_on(path):
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for nbytes in range(len(data)):
        path.write_bytes(data[:nbytes])
        journal = Journal.open(path)
        n_whole = sum(end <= nbytes for end in ends)
        if not n_whole:
            assert journal is None
            continue
        assert len(journal.records) == n_whole
        journal.append({"unit": 7})
        journal.close()
        assert [record.get("unit") for record in read_journal(path)[0]][-1] == 7
        assert len(read_journal(path)[0]) == n_whole + 1


@pytest.mark.parametrize("tail", [b"\0" * 700, b"\xff\n", line({"unit": 2})[:-9] + b"12345678\n"])
def test_a_torn_last_record_is_dropped(path, tail):
    data = path.read_bytes()
    path.write_bytes(data + tail)
    assert read_journal(path) == (read_journal(path)[0], len(data))
    journal = Journal.open(path)
    assert journal.lost_its_end
    journal.append({"unit": 3})
    assert not journal.lost_its_end
    journal.close()
    records, nbytes = read_journal(path)
    assert records[-1] == {"unit": 3}
    assert nbytes == path.stat().st_size


def test_damage_before_a_whole_record_is_no_crash_and_is_refused_by_its_place(path):
    data = bytearray(path.read_bytes())
    first = data.index(b"\n") + 1
    data[first + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackError, match=rf"is damaged at byte {first}: whole records follow"):
        Journal.open(path)
    assert path.read_bytes() == data


def test_a_newer_journal_is_refused_by_its_version(path):
    path.write_bytes(line({"format": "tieredmoe-journal", "version": 2, "anything": 1}))
    with pytest.raises(PackError, match=r"has journal version 2, and this tieredmoe .* version 1"):
        Journal.open(path)


@pytest.mark.parametrize("head", [{"format": "else", "version": 1}, {"version": 1}, {}])
def test_what_is_no_journal_of_ours_is_refused(path, head):
    path.write_bytes(line(head))
    with pytest.raises(PackError, match="is not a journal of ours"):
        Journal.open(path)


@pytest.mark.parametrize("record", [{"state": "written"}, {"unit": 0}, {"unit": 0, "digests": 3}])
def test_a_record_that_nobody_wrote_is_a_clear_error(record):
    with pytest.raises(PackError, match="holds a record that is none"):
        ConversionState.of([{"work": "conversion"}, record])


def test_a_file_too_long_for_a_journal_is_refused_unread(path, monkeypatch):
    monkeypatch.setattr(journal_module, "JOURNAL_NBYTES_MAX", 10)
    with pytest.raises(PackError, match="too long for a journal"):
        Journal.open(path)


def test_no_journal_is_none(tmp_path):
    assert Journal.open(tmp_path / "journal") is None
