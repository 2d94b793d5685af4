"""Table of faults that ``run.py`` plants in the source.

Some test must notice each of them.

A change could introduce every fault by mistake, and a user would report it: a token at the wrong
place, a lost record, damage that is accepted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in one file of the package.

    Attributes:
        name: kebab-case name of the fault.
        file: file that holds it, relative to ``src/batchloom``.
        old: correct source text, which occurs exactly once in the file.
        new: faulty text that replaces it.
        tests: test files or folders under ``tests/`` that should notice it, likeliest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """Name of the subpackage that holds the fault."""
        return self.file.split("/", 1)[0]


def mutate_source(source: str, mutants: Iterable[Mutant]) -> str:
    """Return the text of one file with its mutants applied.

    Raises:
        ValueError: the text of a mutant occurs never or twice, or two mutants overlap.
    """
    edits = []
    for mutant in mutants:
        if (count := source.count(mutant.old)) != 1:
            raise ValueError(f"{mutant.name}: its text occurs {count} times in {mutant.file}")
        start = source.index(mutant.old)
        edits.append((start, start + len(mutant.old), mutant))
    parts, position = [], 0
    for start, stop, mutant in sorted(edits, key=lambda edit: edit[0]):
        if start < position:
            raise ValueError(f"{mutant.name}: it overlaps another mutant of {mutant.file}")
        parts += [source[position:start], mutant.new]
        position = stop
    return "".join([*parts, source[position:]])


def apply_mutants(package: Path, mutants: Iterable[Mutant]) -> None:
    """Plant mutants in a copy of ``src/batchloom``, and delete stale bytecode."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    for file, own in by_file.items():
        path = package / file
        path.write_text(mutate_source(path.read_text(), own))
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            bytecode.unlink()


PLAN = (
    # A document longer than seq_len loses its first sequence and serves its end twice.
    Mutant(
        "cut-document-one-sequence-late",
        "plan/packing/strategies.py",
        "starts=np.concatenate([starts, chunk_index * seq_len]),",
        "starts=np.concatenate([starts, (chunk_index + 1) * seq_len]),",
        ("plan/test_packing.py", "plan/test_plan.py"),
    ),
    # Every epoch takes the pools in the order of the first one.
    Mutant(
        "pool-order-of-the-first-epoch",
        "plan/packing/pools.py",
        'return shuffle_range(self.count, self._key("pools", epoch))',
        'return shuffle_range(self.count, self._key("pools", 0))',
        ("plan/test_shuffle_quality.py", "plan/test_goldens.py", "plan/test_plan.py"),
    ),
    # A store that is shuffled in blocks never serves its last document.
    Mutant(
        "last-document-of-blocks-lost",
        "plan/packing/pools.py",
        "members[members < layer.documents] + layer.first",
        "members[members < layer.documents - 1] + layer.first",
        ("plan/test_plan.py", "plan/test_layers.py"),
    ),
    # Context-parallel ranks hold other chunks of a row than Megatron expects.
    Mutant(
        "zigzag-chunk-of-another-rank",
        "plan/order/rank_slices.py",
        "second = shift + (2 * mesh.context - 2 - context_rank) * half",
        "second = shift + (mesh.context - 1 + context_rank) * half",
        ("plan/test_ranks.py", "batches/test_parallel.py"),
    ),
    # The first sequence behind a ban still serves the banned document.
    Mutant(
        "ban-one-sequence-late",
        "plan/order/run_positions.py",
        "is_after_ban = np.repeat(positions >= start, np.diff(rows.pointers))",
        "is_after_ban = np.repeat(positions > start, np.diff(rows.pointers))",
        ("plan/test_mixture.py", "batches/test_mixture.py", "plan/test_runs.py"),
    ),
    # A longer run resumes after the last sequence of a shorter one, in the middle of a step.
    Mutant(
        "resumed-position-inside-a-step",
        "plan/order/plan_states.py",
        "return orders.run_layout.first_position(step) if inside else int(end)",
        "return int(end)",
        ("plan/test_plan.py", "batches/test_loader.py"),
    ),
    # A state that was edited by hand is accepted.
    Mutant(
        "state-check-not-compared",
        "plan/order/plan_states.py",
        'is_unchanged = state["check"] == fingerprint(checked_fields)',
        'is_unchanged = bool(state["check"])',
        ("plan/test_plan.py",),
    ),
    # The weight of a group is ignored: its sources get their shares of the group.
    Mutant(
        "group-weight-ignored",
        "plan/mixture.py",
        "flat_weights.update({source: group_weight * share for source, share in inside.items()})",
        "flat_weights.update(inside)",
        ("plan/test_mixture.py", "batches/test_mixture_file.py"),
    ),
    # New weights of an edit have no effect.
    Mutant(
        "weights-edit-without-effect",
        "plan/order/timeline.py",
        "planned = self._planned[bisect_right(self._planned, position, key=lambda segment: segment.start) - 1]",
        "planned = self._planned[bisect_right(self._planned, position - 1, key=lambda segment: segment.start) - 1]",
        ("plan/test_mixture.py", "batches/test_mixture.py", "plan/test_runs.py"),
    ),
    # A run of epochs ends before the last sequences, which do not fill a step.
    Mutant(
        "last-partial-step-lost",
        "plan/order/plan.py",
        'steps = step + (inside > 0 and self.spec.last == "fill")',
        "steps = step",
        ("plan/test_plan.py", "batches/test_loader.py"),
    ),
    # overlong="drop" leaves out documents that fill a sequence exactly.
    Mutant(
        "drop-limit-one-token-low",
        "plan/packing/rows.py",
        "fitted_lengths[fitted_lengths > spec.seq_len] = 0",
        "fitted_lengths[fitted_lengths >= spec.seq_len] = 0",
        ("plan/test_plan.py", "plan/test_pools.py"),
    ),
    # An edit of seq_len merges parts of a document although a part between them was served.
    Mutant(
        "repacked-gap-ignored",
        "plan/packing/rows.py",
        "(documents[1:] == documents[:-1]) & (starts[1:] == starts[:-1] + lengths[:-1])",
        "documents[1:] == documents[:-1]",
        ("plan/test_mixture.py", "plan/test_runs.py", "plan/test_exhausted_sources.py"),
    ),
    # A plan takes the cached counts of a plan with another seed.
    Mutant(
        "count-table-of-another-seed",
        "plan/order/source_order.py",
        'names = ["seq_len", "packing", "overlong", "seed", "shuffle", "pool_size"]',
        'names = ["seq_len", "packing", "overlong", "shuffle", "pool_size"]',
        ("plan/test_plan.py", "batches/test_pool_tables.py"),
    ),
)

BATCHES = (
    # labels="shifted" gives each token itself as its target.
    Mutant(
        "labels-not-shifted",
        "batches/assembly/array_filling.py",
        "arrays.labels[:-1] = arrays.ids[1:]",
        "arrays.labels[:] = arrays.ids",
        ("batches/test_kernel.py", "batches/test_batch_assembly.py"),
    ),
    # The mask of shifted labels is one token behind its labels.
    Mutant(
        "loss-mask-shifted-by-one",
        "batches/assembly/array_filling.py",
        "targets[:-1][masked[1:]] = IGNORE",
        "targets[masked] = IGNORE",
        ("batches/test_kernel.py", "batches/test_batch_assembly.py"),
    ),
    # The first padding of a batch is trained.
    Mutant(
        "alignment-padding-trained",
        "batches/assembly/array_filling.py",
        "for _, begin, end, _ in paddings:",
        "for _, begin, end, _ in paddings[1:]:",
        ("batches/test_kernel.py", "batches/test_parallel.py"),
    ),
    # Positions begin at 1.
    Mutant(
        "position-ids-begin-at-one",
        "batches/assembly/array_filling.py",
        "ramps = [ramp[:length] for length in rows.lengths.tolist()]",
        "ramps = [ramp[1 : length + 1] for length in rows.lengths.tolist()]",
        ("batches/test_kernel.py", "batches/test_batch_assembly.py"),
    ),
    # The second micro-batch of a varlen batch counts its tokens from the first one's.
    Mutant(
        "micro-batch-bounds-not-rebased",
        "batches/assembly/batch_assembly.py",
        "own = starts[from_span : to_span + 1] - starts[from_span]",
        "own = starts[from_span : to_span + 1]",
        ("batches/test_parallel.py", "batches/test_forms.py", "batches/test_device.py"),
    ),
    # A resumed run skips the first step behind its state.
    Mutant(
        "resumed-step-skipped",
        "batches/loading/iterations.py",
        "        self._start = step\n        self.resumed = True\n",
        "        self._start = step + 1\n        self.resumed = True\n",
        ("batches/test_loader.py", "batches/test_mixture.py"),
    ),
    # An error while a batch is made ends the iteration as if the run were over.
    Mutant(
        "producer-error-swallowed",
        "batches/producer_thread.py",
        "raise produced_item.error",
        "return",
        ("batches/test_producer_thread.py", "batches/test_loader.py"),
    ),
    # The summed loss is divided by more tokens than carry one.
    Mutant(
        "loss-divisor-with-first-tokens",
        "batches/loading/rank_share.py",
        "return int((rows.lengths - 1).sum())",
        "return int(rows.lengths.sum())",
        ("batches/test_parallel.py", "batches/test_metrics.py"),
    ),
    # A damaged table of counts is accepted.
    Mutant(
        "count-table-checksum-not-compared",
        "batches/loading/pool_tables.py",
        "len(body) == 4 * count and digest_matches:",
        "len(body) == 4 * count:",
        ("batches/test_pool_tables.py", "batches/test_synthetic.py"),
    ),
    # Next-token targets train the last token of each row to predict itself.
    Mutant(
        "last-label-of-row-kept",
        "batches/forms.py",
        "following[:, -1] = padding",
        "following[:, -1] = values[:, -1]",
        ("batches/test_forms.py",),
    ),
    # In a mixture every span of a cut document has the tokens and the mask of the document's beginning.
    Mutant(
        "mixture-mask-of-the-first-span",
        "batches/loading/combined_store.py",
        "arrays = read(documents[indices] - self._firsts[number], starts[indices], lengths[indices])",
        "arrays = read(documents[indices] - self._firsts[number], 0 * starts[indices], lengths[indices])",
        ("batches/test_mixture.py", "preparation/test_chat.py"),
    ),
    # With shifted labels every label has the weight of the token before it.
    Mutant(
        "weights-not-shifted",
        "batches/assembly/array_filling.py",
        "weights[:-1] = flags.weights[1:]",
        "weights[:-1] = flags.weights[:-1]",
        ("batches/test_kernel.py", "batches/test_loss_weights.py"),
    ),
    # The first id behind the vocabulary reaches the model.
    Mutant(
        "id-at-vocabulary-size-served",
        "batches/loading/combined_store.py",
        "highest_id < store.vocab_size:",
        "highest_id <= store.vocab_size:",
        ("store/test_remote_stores.py", "batches/test_loader.py"),
    ),
)

STORE = (
    # After a power cut the manifest names a shard whose tokens never reached the disk.
    Mutant(
        "shard-not-synced",
        "store/write/store_writer.py",
        "os.fsync(self._file.fileno())\n            self._file.close()\n        idx = write_file(",
        "self._file.close()\n        idx = write_file(",
        ("store/test_writer.py", "store/test_reader.py"),
    ),
    # A file has its name before all of it is written.
    Mutant(
        "file-written-in-place",
        "store/write/store_writer.py",
        "    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)\n    digest = xxhash.xxh3_128()\n",
        "    partial_path = path\n    digest = xxhash.xxh3_128()\n",
        ("store/test_reader.py", "store/test_generations.py"),
    ),
    # The flags of the last tokens of a shard are in reverse order in its mask.
    Mutant(
        "mask-tail-bits-reversed",
        "store/format/shard_sidecars.py",
        'return header + self._bits + np.packbits(self._pending_flags, bitorder="little").tobytes()',
        'return header + self._bits + np.packbits(self._pending_flags, bitorder="big").tobytes()',
        ("store/test_golden.py", "batches/test_batch_assembly.py"),
    ),
    # The pointers of a shard of 2**31 tokens and more wrap around.
    Mutant(
        "index-pointer-overflow",
        "store/format/megatron_index.py",
        'token_ends = end + np.cumsum(lengths[start : start + _CHUNK_DOCUMENTS], dtype="<i8")',
        'token_ends = end + np.cumsum(lengths[start : start + _CHUNK_DOCUMENTS], dtype="<i4")',
        ("store/test_golden.py", "store/test_megatron.py", "store/test_export.py"),
    ),
    # The provenance of a document names the line before its own.
    Mutant(
        "provenance-line-off-by-one",
        "store/format/shard_sidecars.py",
        'line = number + 1 if source.kind == "jsonl" else None',
        'line = number if source.kind == "jsonl" else None',
        ("store/test_provenance.py", "preparation/test_store.py", "cli/test_explain.py"),
    ),
    # The end tokens of a removed document carry a loss.
    Mutant(
        "removed-document-trained",
        "store/read/subset_reader.py",
        "flags[index] = LossFlags.none_trained(flags[index].size)",
        "flags[index] = LossFlags.all_trained(flags[index].size)",
        ("store/test_remove.py",),
    ),
    # A compaction that rewrites several shards keeps the last of them alone.
    Mutant(
        "compacted-shard-overwritten",
        "store/maintain/removal.py",
        "numbers[name] += 1",
        "numbers[name] += 0",
        ("store/test_remove.py", "store/test_generations.py"),
    ),
    # Documents are removed while another run changes the store.
    Mutant(
        "removal-without-the-lock",
        "store/maintain/removal.py",
        "with nullcontext() if dry_run else lock_store(folder):",
        "with nullcontext():",
        ("store/test_generations.py", "store/test_remove.py", "preparation/test_guards.py"),
    ),
    # In a large remote store appended documents are read from the first generation's tokens.
    Mutant(
        "later-generation-offset-lost",
        "store/read/remote_store.py",
        "preceding_tokens = np.array([int(entry[1]) for entry in entries], np.int64) + self._tokens[block_layers]",
        "preceding_tokens = np.array([int(entry[1]) for entry in entries], np.int64)",
        ("store/test_remote_stores.py",),
    ),
    # A block that was damaged on its way from a remote store is served.
    Mutant(
        "fetched-block-not-verified",
        "store/read/remote_files.py",
        "if expected_checksums is None or np.array_equal(compute_block_checksums(data), expected_checksums):",
        "if expected_checksums is None or len(data):",
        ("store/test_remote_stores.py", "store/test_remote_faults.py"),
    ),
    # A block that was damaged in the cache is served, although its first read should verify it.
    Mutant(
        "cached-block-not-verified",
        "store/read/remote_blocks.py",
        'if self._verify == "off" and cache_file.table.written_this_boot:',
        "if cache_file.table.written_this_boot:",
        ("store/test_remote_stores.py",),
    ),
    # A changed manifest of an older generation is opened as if it were the original.
    Mutant(
        "older-manifest-not-compared",
        "store/format/manifest.py",
        "if expected is not None and split_checksum(data)[0] != expected:",
        "if not data:",
        ("store/test_generations.py", "store/test_damaged_stores.py"),
    ),
)

PREPARATION = (
    # A run that is killed while it moves its shards leaves a folder that passes for the store.
    Mutant(
        "manifest-before-its-shards",
        "preparation/resumable_job.py",
        "for folder in [work.store / name for name in SUBSETS if (work.store / name).is_dir()]:",
        "(work.out / MANIFEST_NAME).write_bytes((work.store / MANIFEST_NAME).read_bytes())\n"
        "    for folder in [work.store / name for name in SUBSETS if (work.store / name).is_dir()]:",
        ("preparation/test_resume.py", "preparation/test_torture.py"),
    ),
    # A job fails with exactly as many bad records as its budget allows.
    Mutant(
        "quarantine-budget-one-record-low",
        "preparation/report/progress.py",
        "if self.quarantined > count_allowed_bad(self._max_bad, self.records):",
        "if self.quarantined >= count_allowed_bad(self._max_bad, self.records):",
        ("preparation/test_bad_input.py", "preparation/test_convert.py"),
    ),
    # Appended documents stay although the store holds the same documents already.
    Mutant(
        "appended-duplicates-kept",
        "preparation/phases/duplicate_resolution.py",
        "            number + first_number,\n",
        "            number,\n",
        ("preparation/test_append.py",),
    ),
    # A document that was moved to val once comes to train when it is appended again.
    Mutant(
        "validation-document-in-train",
        "preparation/phases/subset_decision.py",
        "overrides=(*self.base_membership.overrides, *overrides))",
        "overrides=overrides)",
        ("preparation/test_append.py",),
    ),
    # An imported file loses its last document if that is one token without an end token.
    Mutant(
        "last-token-of-flat-file-lost",
        "preparation/imports/token_files.py",
        "if last + 1 < tokens.size:",
        "if last + 2 < tokens.size:",
        ("preparation/test_import.py", "store/test_export.py"),
    ),
    # Documents begin with the end token where the model expects its beginning token.
    Mutant(
        "end-token-for-beginning-token",
        "preparation/documents/encode_text.py",
        "output[begins] = tokenizer.bos_id",
        "output[begins] = tokenizer.end_id",
        ("preparation/test_store.py", "tokens"),
    ),
    # The provenance of documents is wrong behind the first 65,536 input files.
    Mutant(
        "part-number-of-16-bits",
        "preparation/units/subset_writer.py",
        'parts = (rows["part"] + np.uint32(first_part)).astype(np.uint32)',
        'parts = (rows["part"] + np.uint32(first_part)).astype(np.uint16)',
        ("preparation/test_many_files.py",),
    ),
    # The order of the quarantine depends on timing and the number of workers.
    Mutant(
        "quarantine-out-of-order",
        "preparation/units/unit_files.py",
        "if not self._bad_in_order:",
        "if False:",
        (
            "preparation/test_bad_records.py",
            "preparation/test_bad_input.py",
            "preparation/test_preferences.py",
        ),
    ),
    # --restart keeps the unit of a file that was written anew with the same size.
    Mutant(
        "stale-unit-kept-by-restart",
        "preparation/units/units.py",
        "content.get(part.source.path, part.source.mtime_ns),",
        "content.get(part.source.path, 0),",
        ("preparation/test_run_failures.py", "preparation/test_resume.py"),
    ),
    # Line numbers in the quarantine are too low behind the first part of a large file.
    Mutant(
        "quarantine-lines-of-documents",
        "preparation/phases/finish.py",
        "before[part.source.path] = starts[-1] + counts.records",
        "before[part.source.path] = starts[-1] + counts.documents",
        (
            "preparation/test_formats.py",
            "preparation/test_bad_input.py",
            "preparation/test_store.py",
        ),
    ),
    # Two runs prepare into one folder at the same time.
    Mutant(
        "work-folder-not-locked",
        "preparation/units/work_folder.py",
        "self._take_lock()",
        "self._lock.truncate(0)",
        (
            "preparation/test_run_failures.py",
            "preparation/test_resume.py",
            "preparation/test_guards.py",
        ),
    ),
    # A long conversation loses a turn that would have ended exactly at the limit.
    Mutant(
        "turn-limit-one-token-low",
        "preparation/documents/overlong_policies.py",
        "return max((stop for stop in ends if stop <= limit), default=0)",
        "return max((stop for stop in ends if stop < limit), default=0)",
        ("chat/test_overlong_conversations.py",),
    ),
)

CHAT = (
    # train_on="last" trains the first answer of a conversation.
    Mutant(
        "first-answer-trained-for-the-last",
        "chat/templates/trained_spans.py",
        'selected = set(assistants[-1:]) if train_on == "last" else selected',
        'selected = set(assistants[:1]) if train_on == "last" else selected',
        ("chat/test_turns.py", "preparation/test_chat.py"),
    ),
    # The default weight of 1 makes a user's or a system's turn a trained one.
    Mutant(
        "weight-trains-user-turns",
        "chat/schema/turns.py",
        "if not is_assistant:",
        "if not trained:",
        ("chat/test_train_flags.py", "chat/test_turns.py"),
    ),
    # The last character of a range of axolotl's train_detail is not trained.
    Mutant(
        "range-without-its-end",
        "chat/schema/turns.py",
        "min(end + 1, len(content))",
        "min(end, len(content))",
        ("chat/test_train_flags.py",),
    ),
    # A key of another library that changes the loss mask is ignored without an error.
    Mutant(
        "unsupported-key-ignored",
        "chat/schema/record_keys.py",
        "return is_non_empty(value) and value != {} and not entry.is_neutral(value)",
        "return False",
        ("chat/test_record_keys.py",),
    ),
    # The stop token behind an answer carries no loss, so that a model never learns to stop.
    Mutant(
        "stop-token-not-trained",
        "chat/templates/turn_positions.py",
        "return begin, begin + ending.end",
        "return begin, begin",
        ("chat/test_turns.py", "chat/test_transformers_agreement.py"),
    ),
    # The header before an answer is trained.
    Mutant(
        "header-trained",
        "chat/templates/turn_positions.py",
        "return slice(start, start + len(header))",
        "return slice(start, start)",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # A result that the template writes in the round of its call is trained with the call.
    Mutant(
        "result-trained-with-its-call",
        "chat/templates/turn_positions.py",
        "return min(stop, limit)",
        "return limit",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # A result without marks is trained with the call in whose round it stands.
    Mutant(
        "hidden-result-trained",
        "chat/templates/turn_positions.py",
        "if not foreign_points and not self._hidden:",
        "if not foreign_points:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # The beginning of a header, as an example has it, is the header.
    Mutant(
        "header-of-an-example",
        "chat/templates/answer_headers.py",
        "if self.template.has_fixed_prompt:",
        "if True:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # A turn that is written twice is trained once.
    Mutant(
        "turn-in-several-places-accepted",
        "chat/templates/turn_positions.py",
        "if not {point.pair for point in body_points}.issuperset(point.pair for point in points):",
        "if not points:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # The header of the next answer ends an answer.
    Mutant(
        "next-answer-s-header-is-a-stop",
        "chat/templates/turn_positions.py",
        "is_stop = self._roles[self._ordered_rounds[following].owner] != ASSISTANT",
        "is_stop = True",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # Text behind a control token is not trained.
    Mutant(
        "token-within-an-answer-is-its-stop",
        "chat/templates/turn_positions.py",
        "is_last = bool(tokens) and tokens[-1].end() == visible and",
        "is_last = bool(tokens) and",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # BOS of the next turn is trained as a stop.
    Mutant(
        "bos-is-a-stop",
        "chat/templates/turn_positions.py",
        "if token is None or token.group() == self._form.bos:",
        "if token is None:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # BOS behind an answer is a part of its stop.
    Mutant(
        "bos-behind-a-stop-trained",
        "chat/templates/turn_positions.py",
        "while token and token.group() != self.bos:",
        "while token:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # Generation marks around other turns are trained.
    Mutant(
        "marks-outside-answers-trained",
        "chat/templates/trained_spans.py",
        "        if not any(turn is not None and turn.head <= start and written <= turn.end for turn in turns):",
        "        if not turns:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # A user whom a template cuts short is not noticed where users have no marks.
    Mutant(
        "unmarked-user-not-checked",
        "chat/templates/marked_checks.py",
        'if not scope.includes("user"):',
        "if False:",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # A thought with which every answer begins counts as its header.
    Mutant(
        "thought-is-a-header",
        "chat/templates/answer_headers.py",
        "return prompt if any(text.strip() for text in texts[1:]) else texts[0]",
        "return prompt",
        ("chat/test_trained_turns.py", "chat/test_turns.py", "chat/test_tool_calls.py"),
    ),
    # The reasoning is trained although it is masked.
    Mutant(
        "masked-reasoning-trained",
        "chat/templates/trained_spans.py",
        "spans = subtract_spans(_merge_spans(spans), list(rendered.thoughts))",
        "spans = _merge_spans(spans)",
        ("chat/test_reasoning.py",),
    ),
    # A mask of the reasoning covers what follows it.
    Mutant(
        "mask-beyond-the-reasoning",
        "chat/templates/reasoning.py",
        "end = max(turn.end - behind, last)",
        "end = turn.end - behind",
        ("chat/test_reasoning.py",),
    ),
    # A split conversation trains the answers before the last one again.
    Mutant(
        "split-trains-answers-again",
        "chat/templates/reasoning.py",
        "trained=[*[False] * number, flags[number]]",
        "trained=[*[None] * number, flags[number]]",
        ("chat/test_reasoning.py",),
    ),
    # Tokenized rows train tokens that loss_mask leaves out, if labels has them.
    Mutant(
        "label-mask-widened-by-loss-mask",
        "chat/schema/record_parser.py",
        "trained = mask if trained is None else trained & mask",
        "trained = mask if trained is None else trained | mask",
        ("chat/test_schemas.py", "chat/test_unusable_records.py", "preparation/test_chat.py"),
    ),
    # With a system column the prompt counts as the first turn of the completion.
    Mutant(
        "completion-one-turn-early",
        "chat/schema/record_parser.py",
        "messages = extended_messages\n                start += 1\n",
        "messages = extended_messages\n",
        ("chat/test_schemas.py", "chat/test_preferences.py", "peers/test_trl_prompts.py"),
    ),
)

STREAMS = (
    # A stream that resumes from a state repeats the last document before it.
    Mutant(
        "resumed-record-repeated",
        "streaming/lane.py",
        "skip = begin.documents_taken",
        "skip = 0",
        ("raw_streams/test_streams.py", "raw_streams/test_keep.py"),
    ),
    # States of ranks at different steps are merged into one.
    Mutant(
        "states-of-different-steps-merged",
        "streaming/raw_stream.py",
        'for name in ("fingerprint", "position"):',
        'for name in ("fingerprint",):',
        ("raw_streams/test_streams.py", "raw_streams/test_keep.py"),
    ),
    # The end of each large file is never streamed.
    Mutant(
        "last-record-range-of-file-lost",
        "streaming/lane.py",
        "pairwise([*range(part.start, part.stop, step), part.stop]):",
        "pairwise(range(part.start, part.stop, step)):",
        ("raw_streams/test_streams.py", "raw_streams/test_keep.py"),
    ),
    # A stream that resumes inside a record range keeps it for the store without its first records.
    Mutant(
        "partial-record-range-kept",
        "streaming/lane.py",
        "if self._setup.keep is not None and begin.epoch == 0 and from_start:",
        "if self._setup.keep is not None and begin.epoch == 0:",
        ("raw_streams/test_keep.py",),
    ),
    # A stream trains the documents of the val subset.
    Mutant(
        "validation-documents-streamed",
        "streaming/lane.py",
        "in_train = codes == 0",
        "in_train = codes != 2",
        ("raw_streams/test_streams.py", "raw_streams/test_keep.py"),
    ),
)

MUTANTS = (*PLAN, *BATCHES, *STORE, *PREPARATION, *CHAT, *STREAMS)
