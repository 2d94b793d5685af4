"""One import in its work folder: shards, notes and manifest."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

import msgspec

from batchloom.core.fingerprint import fingerprint
from batchloom.preparation.documents.subsets import SubsetRule, describe_missed_shares
from batchloom.preparation.imports.import_reader import ImportedFile, ImportReader
from batchloom.preparation.imports.import_spec import ImportSpec, import_spec_to_plain
from batchloom.preparation.imports.imported_shards import (
    SubsetShards,
    choose_linked_dtype,
    copy_shards,
    link_shards,
    make_source_entry,
)
from batchloom.preparation.imports.token_files import (
    DocumentBoundaries,
    TokenInput,
    VocabularyCheck,
    make_reported_sources,
    open_token_file,
)
from batchloom.preparation.plain_store import collect_subsets, finish_plain_store
from batchloom.preparation.report.progress import Listener, Note
from batchloom.preparation.units.subset_writer import open_subset_writers
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.store import Manifest
from batchloom.store.format import (
    FORMAT_VERSION,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    choose_token_dtype,
    make_tokenizer_entry,
)
from batchloom.tokens import Tokenizer, UnknownTokenizer


@final
class ImportRun:
    def __init__(
        self,
        spec: ImportSpec,
        token_inputs: Sequence[TokenInput],
        first_val: int,
        tokenizer: Tokenizer | None,
        listener: Listener,
    ) -> None:
        self._spec = spec
        self._token_inputs = token_inputs
        self._first_val = first_val
        self._tokenizer = tokenizer
        self._listener = listener
        self._vocab_size = tokenizer.vocab_size if tokenizer else spec.vocab_size or 0
        whose = f"tokenizer {tokenizer.name!r}" if tokenizer else "a vocabulary of that size"
        self._check = VocabularyCheck(self._vocab_size, whose)
        self.notes: list[str] = []

    def make(self, work: WorkFolder) -> Manifest:
        """Write the store into the work folder."""
        spec = self._spec
        declared_tokenizer = self._tokenizer
        end_id = declared_tokenizer.end_id if declared_tokenizer else None
        cutting = DocumentBoundaries(spec.dtype, spec.eod, spec.document_tokens, end_id)
        files = []
        for number, token_input in enumerate(self._token_inputs):
            file = open_token_file(token_input, cutting, work.path / f"lengths.{number}")
            self._check.check_dtype(file)
            if file.note:
                self._note(file.note)
            files.append(ImportedFile(file, "val" if number >= self._first_val else "train"))
        if spec.how == "copy":
            dtype = choose_token_dtype("auto", self._vocab_size)
            shards = self._copy(files, work.store, dtype)
        else:
            dtype = choose_linked_dtype(files)
            shards = link_shards(files, work.store, spec.how, ImportReader(files, self._check, "read", self._listener))
        tokenizer = declared_tokenizer or UnknownTokenizer(self._vocab_size, self._end_id(files))
        manifest = self._make_manifest(files, collect_subsets(work.store, shards), dtype, tokenizer)
        report = {
            "sources": msgspec.to_builtins(make_reported_sources(self._token_inputs)),
            "out": os.path.abspath(work.out),
            "notes": self.notes,
        }
        return finish_plain_store(work.store, manifest, tokenizer.state(), report)

    def _copy(self, files: list[ImportedFile], store: Path, dtype: str) -> SubsetShards:
        membership = SubsetRule(self._spec.val_fraction, 0.0)
        reader = ImportReader(files, self._check, "write", self._listener)
        with open_subset_writers(store, dtype, self._spec.tokens_per_shard) as writers:
            shards = copy_shards(writers, files, membership, reader)
        if self._spec.val_fraction and not shards["val"]:
            self._note(
                "There is no val subset: the hashes of all documents choose train. Raise --val-fraction, or name files "
                "for it with --val.",
                is_warning=True,
            )
        return shards

    def _end_id(self, files: Sequence[ImportedFile]) -> int:
        """Return ``eod``, else the last id of all documents, else 0, which fills padding."""
        if self._spec.eod is not None:
            return self._spec.eod
        lasts = set().union(*(imported_file.edges.lasts for imported_file in files))
        if len(lasts) == 1:
            return int(lasts.pop())
        self._note(
            "Documents do not all end with the same id, and --eod is not given: id 0 is recorded as the end "
            "token, and is used for padding only.",
            is_warning=True,
        )
        return 0

    def _make_manifest(
        self,
        files: list[ImportedFile],
        subsets: dict[str, SubsetEntry],
        dtype: str,
        tokenizer: Tokenizer,
    ) -> Manifest:
        documents = sum(entry.documents for entry in subsets.values())
        tokens = sum(entry.tokens for entry in subsets.values())
        by_subset = {name: entry.tokens for name, entry in subsets.items()}
        shares = {"val": self._spec.val_fraction}
        notes = describe_missed_shares(shares, by_subset, documents, balance=False, texts=False, splits=False)
        for text in notes:
            self._note(text, is_warning=True)
        plain = import_spec_to_plain(self._spec)
        return Manifest(
            format_version=FORMAT_VERSION,
            generation=1,
            dtype=dtype,
            # The encoder is unknown; only the tokenizer of the ids is declared.
            tokenizer=msgspec.structs.replace(make_tokenizer_entry(tokenizer), engine="imported", engine_version=""),
            recipe=plain,
            recipe_fingerprint=fingerprint(
                {name: value for name, value in plain.items() if name not in ("inputs", "val")}
            ),
            counts=StoreCounts(documents, documents, tokens, 0, {}),
            subsets=subsets,
            subset_overrides={},
            sources=tuple(self._source(imported_file, tokenizer) for imported_file in files),
        )

    def _source(self, imported_file: ImportedFile, tokenizer: Tokenizer) -> SourceEntry:
        token_input = imported_file.file.token_input
        edges = imported_file.edges
        has_end = edges.lasts == {tokenizer.end_id}
        has_bos = edges.firsts == {tokenizer.bos_id}
        if self._tokenizer and not has_end:
            self._note(
                f"Not every document of {token_input.name} ends with {tokenizer.name!r}'s end token "
                f"{tokenizer.end_id}; the documents are not changed.",
                is_warning=True,
            )
        return make_source_entry(imported_file, has_bos=has_bos, has_end=has_end)

    def _note(self, text: str, *, is_warning: bool = False) -> None:
        self.notes.append(text)
        self._listener(Note(text, is_warning))
