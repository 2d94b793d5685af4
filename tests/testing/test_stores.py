"""Stores written from token ids."""

import pytest

from batchloom.core.errors import InputError
from batchloom.testing import write_store


@pytest.mark.parametrize(("wrong", "dtype"), [(65_536, "uint16"), (-1, "uint16"), (2**31, "int32"), (-1, "int32")])
def test_ids_that_would_wrap_are_refused(tmp_path, wrong, dtype):
    with pytest.raises(InputError, match=f"The id {wrong} does not fit into {dtype}"):
        write_store(tmp_path / "store", [[1, 2], [3, wrong, 4]], dtype=dtype)


def test_the_largest_ids_are_kept(tmp_path):
    store = write_store(tmp_path / "store", [[0, 2**31 - 1]], dtype="int32")
    assert store[0].ids.tolist() == [0, 2**31 - 1]
