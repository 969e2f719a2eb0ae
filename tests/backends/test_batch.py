"""What cannot be a read is refused before anything of its batch starts."""

import pytest

from tieredmoe.backends.batch import check_batch
from tieredmoe.testing.contracts.target import Target


@pytest.mark.parametrize("offset", [2**63 - 4096, 2**63, 2**64])
def test_an_offset_that_no_file_has_is_refused(offset):
    # Cut to 64 bits, it would be the offset of other bytes.
    with pytest.raises(ValueError, match=f"offset {offset}.*past the last byte that a file can"):
        check_batch([Target().op(0, offset)], n_files=1, alignment=4096)


def test_the_last_page_that_a_file_can_have_is_an_offset():
    check_batch([Target().op(0, 2**63 - 8192)], n_files=1, alignment=4096)
