"""Inputs of the golden tests, computed from integers alone.

Nothing here depends on the Python version, the platform, the clock or installed data. Files are
written below one folder, and every file has the same modification time.
"""

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

_MASK = (1 << 64) - 1
_MODIFIED_NS = 1_700_000_000 * 10**9

_VOCABULARY = """
the of and to in that is was with for as on be at by have from this not are but which or an they
river mountain letter engine garden winter window market music history number paper bridge doctor
teacher village machine forest island captain question answer morning evening yellow silver quiet
narrow early gentle modern ancient heavy simple carried wrote followed opened measured painted
counted learned remembered crossed built found returned listened
"""
_WORDS = tuple(_VOCABULARY.split())
_OTHER_WORDS = ("Straße", "naïve", "cafe\u0301", "東京", "привет", "भाषा", "שלום", "🙂", "👩‍🔬")


class Dice:
    """Seeded source of whole numbers: a 64-bit linear congruential generator."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 1) & _MASK

    def below(self, limit: int) -> int:
        """Return the next number from 0 to ``limit`` - 1."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
        return (self._state >> 33) % limit

    def choose(self, items: Sequence[str]) -> str:
        """Return one of the items."""
        return items[self.below(len(items))]


def make_sentence(dice: Dice, words: int) -> str:
    """Return a sentence of ``words`` words; one word in forty is not ASCII."""
    chosen = [dice.choose(_OTHER_WORDS if dice.below(40) == 0 else _WORDS) for _ in range(max(words, 1))]
    return f"{chosen[0].capitalize()} {' '.join(chosen[1:])}".strip() + "."


def make_paragraph(dice: Dice, sentences: int) -> str:
    """Return a paragraph; its sentences have 3 to 14 words."""
    return " ".join(make_sentence(dice, 3 + dice.below(12)) for _ in range(sentences))


def make_text(dice: Dice) -> str:
    """Return a text; lengths spread over two orders of magnitude."""
    kind = dice.below(20)
    if kind == 0:
        return dice.choose(_WORDS)
    if kind == 1:
        return "\n\n".join(make_paragraph(dice, 6) for _ in range(4))
    return make_paragraph(dice, 1 + dice.below(4))


def make_texts(seed: int, count: int) -> list[str]:
    """Return texts that include duplicates, empty texts and an overlong text."""
    dice = Dice(seed)
    bodies = [make_text(dice) for _ in range(count)]
    for number in range(9, count, 17):
        bodies[number] = bodies[number // 2]
    bodies[5 % count] = ""
    bodies[7 % count] = " \n"
    bodies[11 % count] = "\n\n".join(make_paragraph(dice, 9) for _ in range(7))
    return bodies


def write_inputs(root: Path) -> None:
    """Write all inputs below a folder."""
    _write_corpus(root / "corpus")
    _write_records(root / "records.jsonl")
    _write_notes(root / "notes.csv")
    _write_tables(root / "tables")
    _write_packed(root / "packed")
    _write_conversations(root)
    _write_preferences(root)
    _write_objectives(root / "objectives")
    _write_pages(root / "pages.jsonl")
    _write_similar(root / "similar.jsonl")
    _write_verses(root / "verses")
    _write_ids(root / "ids")
    _write_sets(root / "sets")
    _write_news(root / "news")
    _write_tokenizer(root / "tokenizer.json")
    _write_pictures(root / "pictures")
    _write_processor(root / "processor")
    _write_losses(root / "losses")
    _write_weighted(root / "weighted")
    fix_times(root)


def fix_times(root: Path) -> None:
    """Give every file and folder below a folder the same modification time."""
    for path in [root, *root.rglob("*")]:
        os.utime(path, ns=(_MODIFIED_NS, _MODIFIED_NS))


def _write(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def _to_json_lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _write_corpus(folder: Path) -> None:
    """Write texts, Markdown and code in folders, and files that ``prepare`` ignores."""
    for number, body in enumerate(make_texts(1, 40)):
        name = f"part{number % 3}/text{number:02}.{'md' if number % 7 == 0 else 'txt'}"
        _write(folder / name, body)
    dice = Dice(2)
    for number in range(6):
        lines = [f"def step_{number}_{line}(x):\n    return x + {dice.below(99)}\n" for line in range(4)]
        _write(folder / f"code/module{number}.py", "\n".join(lines))
    _write(folder / "line_ends.txt", "One line\r\nand another\rand a third\n")
    _write(folder / "byte_order.txt", b"\xef\xbb\xbfBehind a byte-order mark.")
    _write(folder / "decomposed.txt", "A\u030angstro\u0308m is two accents.")
    _write(folder / ".hidden.txt", "Nobody reads this.")
    _write(folder / "binary.bin", bytes(range(256)))


def _write_records(file: Path) -> None:
    """Write JSON lines with the text in ``body``, and bad records among them."""
    dice = Dice(3)
    lines = [
        _to_json_lines([{"id": number, "body": body, "kind": dice.choose(("web", "book", "talk"))}])
        for number, body in enumerate(make_texts(4, 180))
    ]
    lines.insert(20, '{"id": 1000, "body": "cut off\n')
    lines.insert(60, '{"id": 1001, "other": "no such field"}\n')
    lines.insert(61, '{"id": 1002, "body": 17}\n')
    lines.insert(90, '{"id": 1003, "body": null}\n')
    data = "".join(lines).encode()
    _write(file, data + b'{"id": 1004, "body": "not \xff UTF-8"}\n')


def _write_notes(file: Path) -> None:
    """Write a CSV with quoted fields and a ragged row."""
    rows = ["number,title,note"]
    for number, body in enumerate(make_texts(5, 60)):
        quoted = body.replace('"', '""')
        rows.append(f'{number},"Title, {number}","{quoted} ""quoted"""')
    rows.insert(30, "1000,ragged")
    _write(file, "\r\n".join(rows) + "\r\n")


def _write_tables(folder: Path) -> None:
    """Write a Parquet file of two row groups and an Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    bodies = make_texts(6, 50)
    table = pa.table({"id": list(range(50)), "text": bodies, "score": [n * n for n in range(50)]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=30, compression="none")
    text_table = pa.table({"text": make_texts(7, 30)})
    with (
        pa.OSFile(str(folder / "rows.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, text_table.schema) as out,
    ):
        out.write_table(text_table, max_chunksize=16)


def _write_packed(folder: Path) -> None:
    """Write gzip, zstd, zip and tar files of texts and records."""
    import zstandard

    lines = _to_json_lines({"text": body} for body in make_texts(8, 30)).encode()
    buffer = io.BytesIO()
    # Stored blocks, because compressed ones differ between builds of zlib.
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=0, mtime=0) as file:
        file.write(lines)
    _write(folder / "records.jsonl.gz", buffer.getvalue())
    body = "\n\n".join(make_texts(9, 12)).encode()
    _write(folder / "text.txt.zst", zstandard.ZstdCompressor(level=3).compress(body))
    with zipfile.ZipFile(folder / "members.zip", "w", zipfile.ZIP_STORED) as archive:
        for number, member in enumerate(make_texts(10, 8)):
            info = zipfile.ZipInfo(f"inner/{number}.txt", (2020, 1, 1, 0, 0, 0))
            archive.writestr(info, member)
    with tarfile.open(folder / "members.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, member in enumerate(make_texts(11, 8)):
            data = member.encode()
            entry = tarfile.TarInfo(f"{number}.md")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _write_conversations(root: Path) -> None:
    """Write conversations and instructions, some bad, some overlong."""
    dice = Dice(12)
    records: list[object] = []
    for number in range(90):
        turns = []
        if number % 4 == 0:
            turns.append({"role": "system", "content": make_sentence(dice, 5)})
        for _ in range(1 + dice.below(3)):
            turns.append({"role": "user", "content": make_sentence(dice, 2 + dice.below(12))})
            turns.append({"role": "assistant", "content": make_paragraph(dice, 1 + dice.below(3))})
        if number % 10 == 3:
            turns[-1]["weight"] = 0
        if number == 17:
            turns[-1]["content"] = "\n".join(make_paragraph(dice, 8) for _ in range(5))
        records.append({"id": number, "messages": turns})
    records[30] = records[15]
    records[40] = {"messages": [{"role": "user", "content": "Is anybody there?"}]}
    records[41] = {"messages": [{"role": "nobody", "content": "A role that does not exist."}]}
    records[42] = {"messages": "no list"}
    _write(root / "talks.jsonl", _to_json_lines(records))
    tasks = [
        {
            "instruction": make_sentence(dice, 6),
            "input": make_sentence(dice, 8) if number % 3 == 0 else "",
            "output": make_paragraph(dice, 1 + dice.below(2)),
        }
        for number in range(60)
    ]
    _write(root / "tasks.jsonl", _to_json_lines(tasks))


def _write_preferences(root: Path) -> None:
    """Write pairs of a chosen and a rejected answer, and labelled answers."""
    dice = Dice(13)
    pairs: list[dict[str, object]] = [
        {
            "prompt": make_sentence(dice, 6),
            "chosen": make_paragraph(dice, 2),
            "rejected": make_sentence(dice, 4),
        }
        for _ in range(60)
    ]
    pairs[20] = dict(pairs[10])
    pairs[25]["rejected"] = pairs[25]["chosen"]
    pairs[26]["chosen"] = ""
    _write(root / "pairs.jsonl", _to_json_lines(pairs))
    labels = [
        {
            "prompt": make_sentence(dice, 6),
            "completion": make_sentence(dice, 3 + dice.below(9)),
            "label": number % 3 == 0,
        }
        for number in range(60)
    ]
    _write(root / "labels.jsonl", _to_json_lines(labels))


def _write_objectives(folder: Path) -> None:
    """Write prompts with columns for rewards."""
    dice = Dice(41)
    prompts: list[dict[str, object]] = [
        {
            "prompt": [{"role": "user", "content": make_sentence(dice, 4 + dice.below(9))}] if n % 3 else f"Say {n}.",
            "answer": [None, n / 4, f"ça {n}", [n, {"of": n}]][n % 4],
            "reward": {"truth": n % 2 == 0},
        }
        for n in range(60)
    ]
    prompts[20] = dict(prompts[10])
    prompts[25].pop("answer")
    prompts[26]["prompt"] = ""
    _write(folder / "prompts.jsonl", _to_json_lines(prompts))


def _write_pages(file: Path) -> None:
    """Write texts with work for every cleaning step."""
    dice = Dice(14)
    pages = []
    for number in range(40):
        body = "\n\n".join(make_paragraph(dice, 6) for _ in range(2))
        kind = number % 10
        if kind == 1:
            body = f"<html><body><nav>Home</nav><h1>Page</h1><p>{body}</p></body></html>"
        elif kind == 2:
            body = f"Accept all cookies\n{body}\nRead more\n3 likes"
        elif kind == 3:
            body = f"Write to jane.{number}@mail.org from 8.8.8.{number}.\n{body}"
        elif kind == 4:
            body = f"\u200bHidden\u00ad marks\x07 and  runs   of blanks  \n\n\n\n\n{body}"
        elif kind == 5:
            body = body.replace("the", "dÃ¼r", 3)
        elif kind == 6:
            body = make_sentence(dice, 4)
        elif kind == 7:
            body = "\n".join([make_sentence(Dice(99), 9)] * 12)
        elif kind == 8:
            body = "Der Fluss ist lang und das Dorf liegt am Ufer, wo die Menschen leben. " * 12
        elif kind == 9:
            body = f"We use cookies and javascript {{ here }}.\n{body}"
        pages.append({"text": body})
    _write(file, _to_json_lines(pages))


def _write_similar(file: Path) -> None:
    """Write documents and near duplicates of some of them."""
    dice = Dice(15)
    bodies = [make_paragraph(dice, 12) for _ in range(40)]
    for number in range(0, 40, 4):
        words = bodies[number].split(" ")
        words[dice.below(len(words))] = "altogether"
        bodies.append(" ".join(words))
    bodies.append(bodies[3])
    _write(file, _to_json_lines({"text": body} for body in bodies))


def _write_verses(folder: Path) -> None:
    """Write texts whose lines and paragraphs repeat."""
    dice = Dice(16)
    refrain = make_sentence(dice, 6)
    for number in range(6):
        stanzas = ["\n".join([make_sentence(dice, 5), make_sentence(dice, 7), refrain]) for _ in range(3 + number % 3)]
        _write(folder / f"{number}.txt", "\n\n".join(stanzas) + "\n***\n" + make_paragraph(dice, 2))


def _write_ids(folder: Path) -> None:
    """Write token ids: JSON lines, a flat file, a Megatron pair, and an array."""
    import numpy as np

    dice = Dice(17)
    rows = [list(make_sentence(dice, 1 + dice.below(9)).encode()) for _ in range(50)]
    records: list[object] = []
    for number, ids in enumerate(rows):
        labels = [-100 if position < number % 5 else value for position, value in enumerate(ids)]
        records.append({"input_ids": ids, "labels": labels})
    _write(folder / "rows.jsonl", _to_json_lines(records))
    flat = [value for ids in rows for value in [*ids, 256]]
    _write(folder / "flat.bin", np.array(flat, "<u2").tobytes())
    lengths = [len(ids) + 1 for ids in rows]
    _write(folder / "pair.bin", np.array(flat, "<i4").tobytes())
    _write(folder / "pair.idx", _make_megatron_index(lengths, 4))
    np.save(folder / "table.npy", np.array(flat[:600], np.uint16).reshape(20, 30))


def _make_megatron_index(lengths: Sequence[int], size: int) -> bytes:
    """Return a Megatron index of ids of ``size`` bytes."""
    import struct

    code = {4: 4, 2: 8}[size]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    pointers = [size * sum(lengths[:number]) for number in range(len(lengths))]
    document_indices = range(len(lengths) + 1)
    return (
        header
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(lengths) + 1}q", *document_indices)
    )


def _write_sets(folder: Path) -> None:
    """Write a YAML manifest of several data sets, and their files."""
    dice = Dice(18)
    additions = [{"q": f"What is {n} + {n}?", "a": f"{2 * n}. {make_sentence(dice, 5)}"} for n in range(40)]
    _write(folder / "data/sums.jsonl", _to_json_lines(additions))
    rows = ["id,body", *(f'{n},"{make_sentence(dice, 6)}"' for n in range(30))]
    _write(folder / "data/notes.csv", "\n".join(rows) + "\n")
    manifest = """\
datasets:
  - path: sums.jsonl
    data_folder: data
    data_type: jsonl
    name: sums
    weight: 2
    mapping: {prompt: q, response: a}
  - path: data/notes.csv
    data_type: csv
    text_field: body
"""
    _write(folder / "all.yaml", manifest)


def _write_news(folder: Path) -> None:
    """Write two files; the second repeats a part of the first."""
    bodies = make_texts(19, 70)
    _write(folder / "monday.jsonl", _to_json_lines({"text": body} for body in bodies[:40]))
    _write(folder / "tuesday.jsonl", _to_json_lines({"text": body} for body in bodies[30:]))


def make_byte_alphabet() -> list[str]:
    """Return the character that represents each byte in byte-level tokenizers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(unprintable)}
    return [characters[byte] for byte in range(256)]


def make_tokenizer_json(control: Sequence[str]) -> str:
    """Return a byte-level ``tokenizer.json`` with these control tokens."""
    vocabulary = {character: number for number, character in enumerate(make_byte_alphabet())}
    added = [
        {
            "id": 256 + number,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, name in enumerate(control)
    ]
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary | {name: 256 + n for n, name in enumerate(control)},
            "merges": [],
        },
    }
    return json.dumps(definition, ensure_ascii=False, indent=1)


def _write_tokenizer(file: Path) -> None:
    """Write a tokenizer with control tokens for fill-in-the-middle and templates."""
    control = [
        *("<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        *("<|im_start|>", "<|im_end|>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"),
    ]
    _write(file, make_tokenizer_json(control))


def _write_pictures(folder: Path) -> None:
    """Write images (PPM) and conversations about them; one image is missing."""
    dice = Dice(20)
    talks: list[object] = []
    for number in range(16):
        width, height = 28 + 8 * (number % 4), 28 + 12 * (number % 3)
        pixels = bytes(dice.below(256) for _ in range(width * height * 3))
        name = f"images/{number:02}.ppm"
        _write(folder / name, f"P6\n{width} {height}\n255\n".encode() + pixels)
        question = {"role": "user", "content": f"<image> {make_sentence(dice, 4)}"}
        answer = {"role": "assistant", "content": make_sentence(dice, 3 + number % 5)}
        talks.append({"messages": [question, answer], "images": [name]})
    words = [
        {"role": "user", "content": make_sentence(dice, 4)},
        {"role": "assistant", "content": make_sentence(dice, 9)},
    ]
    talks.append({"messages": words})
    talks.append({"messages": [question, answer], "images": ["images/missing.ppm"]})
    _write(folder / "talks.jsonl", _to_json_lines(talks))


def _write_processor(folder: Path) -> None:
    """Write a Qwen2-VL processor without video in the format of transformers."""
    control = [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    ]
    _write(folder / "tokenizer.json", make_tokenizer_json(control))
    tokenizer_config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": [],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write(folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=1))
    image_processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 50176, "shortest_edge": 3136},
        "temporal_patch_size": 2,
    }
    _write(folder / "preprocessor_config.json", json.dumps(image_processor, indent=1))


def _write_weighted(folder: Path) -> None:
    """Write records of each kind, whose weights, messages, parts, segments and tokens have loss weights."""
    dice, records = Dice(40), dict[str, list[object]]()
    weights = [None, 1, 0.5, 2, 0, 0.123]
    for number in range(60):
        weight, sentence = weights[number % 6], make_sentence(dice, 3 + dice.below(9))
        parts = [{"type": "text", "text": "First. ", "weight": 0}, {"type": "text", "text": sentence, "weight": 3}]
        messages = [
            {"role": "user", "content": f"Question {number}"},
            {"role": "assistant", "content": sentence, "loss_scale": 0.25},
            {"role": "user", "content": "And then?", "loss_weight": 0.1},
            {"role": "assistant", "content": parts if number % 3 == 0 else sentence, "weight": 10},
        ]
        segments = [{"text": f"{number}. ", "label": False}, {"text": sentence, "label": True, "loss_weight": 0.75}]
        ids = list(sentence.encode())
        token_weights = [position % 7 / 2 for position in range(len(ids))]
        records.setdefault("talks", []).append({"messages": messages, "weight": weight})
        records.setdefault("texts", []).append({"text": f"{number} {sentence}", "weight": weight})
        records.setdefault("segments", []).append({"segments": segments, "weight": weight})
        records.setdefault("ids", []).append({"input_ids": ids, "loss_weights": token_weights, "weight": weight})
    for name, listed in records.items():
        _write(folder / f"{name}.jsonl", _to_json_lines(listed))


def _write_losses(folder: Path) -> None:
    """Write the loss curves of two finished runs."""
    for name, slope in (("first", 50), ("second", 49)):
        rows = [f'{{"step": {step}, "loss": {7000 - step * slope}.0}}\n' for step in range(1, 41)]
        _write(folder / f"{name}.jsonl", "".join(rows))
