"""Files that exist are whole, whoever else was at them."""

from batchloom.dedup.aside import written


def test_two_who_write_the_same_file_do_not_meet(tmp_path):
    """A worker that was given up for lost goes on beside the one that took its place."""
    path = tmp_path / "0.rows"
    with written(path) as lost:
        lost.write(b"one")
        with written(path) as other:
            other.write(b"one two")
        assert path.read_bytes() == b"one two"
        lost.write(b" two")
    assert path.read_bytes() == b"one two"
    assert [one.name for one in tmp_path.iterdir()] == ["0.rows"]
