"""Reading whole inputs as preparation does: listed, cut into parts, read part by part."""

from batchloom.sources import (
    PartReader,
    ReadLimits,
    ReadRules,
    RecordBounds,
    list_sources,
    make_bad_record_error,
    split_source,
)


class Read:
    """All records of some inputs: values, absolute record numbers, offsets, sentences of errors."""

    def __init__(self, *inputs, field=None, unit=1 << 40, limits=None):
        rules = ReadRules(text_field=field, limits=limits or ReadLimits())
        bounds = RecordBounds(rules)
        self.values, self.records, self.offsets, self.bad, self.seen = [], [], [], [], 0
        listing = list_sources([str(one) for one in inputs])
        self.notes, self.sources, self.hashes = listing.notes, listing.sources, []
        for source in listing.sources:
            before = 0
            for part in split_source(source, rules, unit):
                seen = 0
                with PartReader(part, rules, bounds) as reader:
                    for found in reader:
                        assert len(found.values) == len(found.records) == len(found.offsets)
                        self.values += found.values
                        self.records += [before + record for record in found.records]
                        self.offsets += found.offsets
                        self.bad += [str(make_bad_record_error(source, rules, before, one)) for one in found.bad]
                        seen += found.records_read
                    self.hashes.append(reader.finish())
                before += seen
            self.seen += before
