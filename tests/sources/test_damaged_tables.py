"""Damaged Arrow and Parquet files raise an error that names them, without a crash."""

import io
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from batchloom import BatchloomError, InputError
from batchloom.cli import run_command_line
from batchloom.sources.formats import table_probe
from sources.source_reading import read_inputs

ROWS = [{"text": f"row {n} é", "n": n, "l": [1, None], "s": {"a": None, "b": [{"c": 1.5}]}} for n in range(60)]
TABLE = pa.Table.from_pylist(ROWS)
DICTIONARY_TABLE = TABLE.set_column(0, "text", TABLE["text"].dictionary_encode())
VIEWS = pa.table(
    {
        "text": pa.array([row["text"] for row in ROWS], pa.string_view()),
        "pairs": pa.array([[("a", 1)]] * 60, pa.map_(pa.string(), pa.int64())),
        "two": pa.array([[1, 2]] * 60, pa.list_(pa.int8(), 2)),
    }
)
EDGES = [
    b"\xff" * 4,
    b"\0\0\0\x80",
    b"\xff\xff\xff\x7f",
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
]


def encode_ipc(table, make, compression):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    buffer = io.BytesIO()
    with make(buffer, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=25)
    return ".arrow", buffer.getvalue()


def encode_parquet(table, **options):
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=25, **options)
    return ".parquet", buffer.getvalue()


def make_sound_files():
    """Return (ending, bytes) of files of each kind."""
    tables = (TABLE, DICTIONARY_TABLE, VIEWS)
    makers = (pa.ipc.new_file, pa.ipc.new_stream)
    files = [
        encode_ipc(table, make, compression)
        for table in tables
        for make in makers
        for compression in (None, "lz4", "zstd")
    ]
    forms = (
        {},
        {"compression": "none", "data_page_version": "2.0"},
        {"compression": "gzip", "use_dictionary": False},
        {"compression": "none", "use_dictionary": False},
    )
    return files + [encode_parquet(table, **form) for table in tables for form in forms]


def damage(data, rng):
    """Change, remove, insert or copy bytes of a file, mostly near its ends."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(data)
        candidates = (rng.randrange(size), rng.randrange(600), size - 1 - rng.randrange(1500))
        at, source = max(0, min(rng.choice(candidates), size - 1)), rng.randrange(size)
        action = rng.randrange(6)
        if action == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[at] = rng.randrange(256)
        elif action == 2:
            edge = rng.choice(EDGES)
            data[at : at + len(edge)] = edge
        elif action == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif action == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            data[at : at + 30] = data[source : source + 30]
    return bytes(data)


def read_damaged(folder, first, last):
    """Read the files of some seeds, with all columns and with the text column only."""
    pa.set_cpu_count(1)
    files = make_sound_files()
    for seed in range(first, last):
        rng = random.Random(seed)
        ending, data = rng.choice(files)
        path = Path(folder) / f"{seed}{ending}"
        path.write_bytes(damage(data, rng))
        print(seed, flush=True)
        for field in (None, "text"):
            try:
                read_inputs(path, field=field, unit=4000)
            except BatchloomError as error:
                if path.name not in str(error):
                    raise AssertionError(str(error)) from error
        path.unlink()


def run_seeds(folder, first, last):
    code = f"from sources.test_damaged_tables import read_damaged; read_damaged({str(folder)!r}, {first}, {last})"
    paths = [str(Path(__file__).parent.parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    seed = process.stdout.split()[-1] if process.stdout else "none"
    assert process.returncode == 0, f"seed {seed}: {process.returncode}\n{process.stderr[-3000:]}"
    assert int(seed) == last - 1


@pytest.mark.slow
def test_no_damage_ends_the_process(tmp_path):
    run_seeds(tmp_path, 0, 100)


@pytest.mark.slow
def test_no_damage_of_many_seeds_ends_the_process(tmp_path):
    run_seeds(tmp_path, 100, 12_000)


# pyarrow reads the file footer in a thread, and a process that ends before the thread may be aborted.
EXIT_SCRIPT = """
import os, sys
from batchloom import InputError
from batchloom.sources import list_sources, ReadRules, RecordBounds
import batchloom.sources.formats.table_format
source = list_sources([sys.argv[1]]).sources[0]
bounds = RecordBounds(ReadRules())
for _ in range(int(sys.argv[2])):
    if not (child := os.fork()):
        try:
            bounds.starts(source)
        except InputError:
            sys.exit(3)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 3, status
"""


@pytest.mark.parametrize("processes", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_process_exits_normally_after_a_damaged_file(tmp_path, processes):
    path = tmp_path / "a.arrow"
    path.write_bytes(b"ARROW1\0\0" + b"\xff" * 400)
    command = [sys.executable, "-c", EXIT_SCRIPT, str(path), str(processes)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


class KmsClient(pe.KmsClient):
    """A key client that does not wrap keys."""

    def wrap_key(self, key, name):
        return key.hex()

    def unwrap_key(self, key, name):
        return bytes.fromhex(key)


def test_a_file_with_an_encrypted_column_is_named(tmp_path):
    factory = pe.CryptoFactory(lambda _: KmsClient())
    keys = pe.EncryptionConfiguration("footer", column_keys={"key": ["text"]}, plaintext_footer=True)
    encryption = factory.file_encryption_properties(pe.KmsConnectionConfig(), keys)
    path = tmp_path / "a.parquet"
    table = TABLE.select(["text", "n"])
    with pq.ParquetWriter(path, table.schema, encryption_properties=encryption) as writer:
        writer.write_table(table)
    with pytest.raises(
        InputError, match="a.parquet is damaged or has encrypted columns: .* crashed on it .* without encryption"
    ):
        read_inputs(path)


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"compression": "none"}])
def test_row_groups_are_those_of_pyarrow(tmp_path, options):
    wide = pa.table({f"c{n}": [f"{n}-{row}" for row in range(60)] for n in range(20)})
    path = tmp_path / "a.parquet"
    for table in (TABLE, wide, TABLE[:0]):
        pq.write_table(table, path, row_group_size=7, **options)
        metadata = pq.ParquetFile(path).metadata
        starts = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = [group.column(at) for at in range(group.num_columns)]
            pages = [column.data_page_offset for column in columns]
            pages += [column.dictionary_page_offset for column in columns if column.has_dictionary_page]
            starts += [min(pages)] if group.num_rows else []
        result = read_inputs(path, unit=2000)
        assert sorted(set(result.offsets)) == starts
        assert result.seen == table.num_rows


def test_an_ipc_file_without_an_end_marker_is_read(tmp_path):
    """Arrow before 0.15 did not write the marker."""
    _, data = encode_ipc(TABLE, pa.ipc.new_file, None)
    length = int.from_bytes(data[-10:-6], "little")
    marker = len(data) - 10 - length - 8
    assert data[marker : marker + 8] == b"\xff\xff\xff\xff\0\0\0\0"
    path = tmp_path / "a.arrow"
    path.write_bytes(data[:marker] + data[marker + 8 :])
    assert read_inputs(path).values == ROWS


CRASHING_PARSER = """
import os, signal, sys
if "batchloom.sources.formats.table_probe" in " ".join(sys.orig_argv):
    import pyarrow.parquet as pq

    class CrashingFile(pq.ParquetFile):
        def __init__(self, file, **options):
            data = file.read()
            for word, number in ((b"crash", signal.SIGSEGV), (b"kill", signal.SIGKILL)):
                if word in data:
                    os.kill(os.getpid(), number)
            file.seek(0)
            super().__init__(file, **options)

    pq.ParquetFile = CrashingFile
"""


@pytest.fixture(scope="module")
def crashing_probes(tmp_path_factory):
    """Probe processes, which open tables first, whose parser crashes on some texts."""
    folder = tmp_path_factory.mktemp("crashing")
    (folder / "sitecustomize.py").write_text(CRASHING_PARSER)
    return folder


@pytest.fixture
def run(crashing_probes, tmp_path, monkeypatch, capfd):
    """Run a command on a sound table and one of a text; return its exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(crashing_probes), prepend=os.pathsep)
    # Another test may have started the probe without this path.
    table_probe._probe.close()

    def run_command(command_line, text):
        shutil.rmtree("data", ignore_errors=True)
        Path("data").mkdir()
        pq.write_table(pa.table({"text": ["sound"] * 3}), "data/a.parquet")
        pq.write_table(pa.table({"text": [text] * 3}), "data/b.parquet")
        return run_command_line(command_line.split()), "".join(capfd.readouterr())

    yield run_command
    table_probe._probe.close()


@pytest.mark.parametrize(
    "command_line",
    [
        "prepare data --out store --tokenizer bytes",
        *(
            pytest.param(command_line, marks=pytest.mark.slow)
            for command_line in (
                "prepare data --out store --tokenizer bytes --workers 1",
                "doctor data --tokenizer bytes",
                "convert data --out out.jsonl",
            )
        ),
    ],
)
def test_a_crash_of_the_parser_is_an_error_that_names_the_file(run, command_line):
    code, output = run(command_line, "crash")
    assert code == 1, output
    assert (
        "b.parquet is damaged or has encrypted columns: the parser of parquet files crashed on it (SIGSEGV)" in output
    )
    assert "Traceback" not in output
    code, output = run(command_line, "other")
    assert code == 0, output


def test_a_killed_probe_process_does_not_blame_the_file(run):
    code, output = run("convert data --out out.jsonl", "kill")
    assert "b.parquet cannot be read: the process that opened it was killed (out of memory?)" in output
    assert code == 1
