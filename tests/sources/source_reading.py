"""Reading complete inputs as preparation does: list, split, read by part."""

from dataclasses import dataclass, field as make_field

from batchloom.sources import (
    PartReader,
    ReadLimits,
    ReadRules,
    RecordBounds,
    list_sources,
    make_bad_record_error,
    split_source,
)


@dataclass
class ReadResult:
    """All records of some inputs.

    Attributes:
        values: the value of every record.
        records: absolute record numbers.
        offsets: byte offsets of the records.
        bad: error messages of the bad records.
        seen: number of records read, bad ones included.
        notes: notes of the listing.
        sources: sources of the listing.
        hashes: the hash of every part.
    """

    values: list = make_field(default_factory=list)
    records: list = make_field(default_factory=list)
    offsets: list = make_field(default_factory=list)
    bad: list = make_field(default_factory=list)
    seen: int = 0
    notes: tuple = ()
    sources: tuple = ()
    hashes: list = make_field(default_factory=list)


def read_inputs(*inputs, field=None, unit=1 << 40, limits=None):
    """Read all records of some inputs."""
    rules = ReadRules(text_field=field, limits=limits or ReadLimits())
    bounds = RecordBounds(rules)
    listing = list_sources([str(location) for location in inputs])
    result = ReadResult(notes=listing.notes, sources=listing.sources)
    for source in listing.sources:
        first_record = 0
        for part in split_source(source, rules, unit):
            part_records = 0
            with PartReader(part, rules, bounds) as reader:
                for block in reader:
                    assert len(block.values) == len(block.records) == len(block.offsets)
                    result.values += block.values
                    result.records += [first_record + record for record in block.records]
                    result.offsets += block.offsets
                    result.bad += [str(make_bad_record_error(source, rules, first_record, bad)) for bad in block.bad]
                    part_records += block.records_read
                result.hashes.append(reader.finish())
            first_record += part_records
        result.seen += first_record
    return result
