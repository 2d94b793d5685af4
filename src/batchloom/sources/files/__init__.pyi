from .file_choice import describe_patterns as describe_patterns
from .file_opening import (
    Compression as Compression,
    Spool as Spool,
    get_pinned_revision as get_pinned_revision,
    get_suffix as get_suffix,
)
from .part_stream import (
    CompactParts as CompactParts,
    CompactSequence as CompactSequence,
    RecordSample as RecordSample,
    Source as Source,
    SourceTable as SourceTable,
    choose_random_records as choose_random_records,
    open_source as open_source,
)
