from .file_positions import (
    format_record_name as format_record_name,
    locate_record as locate_record,
    make_bad_record_error as make_bad_record_error,
)
from .files.declared_formats import DeclaredInput as DeclaredInput
from .files.hub_datasets import parse_hub_name as parse_hub_name
from .files.part_stream import PartStream as PartStream
from .files.prefetch import prefetch_sources as prefetch_sources
from .files.source_names import make_input_labels as make_input_labels
from .files.source_rules import (
    ReadLimits as ReadLimits,
    ReadRules as ReadRules,
    SourcePart as SourcePart,
)
from .formats.text_cuts import find_document_end as find_document_end
from .listing import (
    STORE_MARKER_NAME as STORE_MARKER_NAME,
    SourceListing as SourceListing,
    describe_missing_input as describe_missing_input,
    list_sources as list_sources,
    strip_wildcard_part as strip_wildcard_part,
)
from .part_reader import PartReader as PartReader, split_source as split_source
from .record_bounds import RecordBounds as RecordBounds, open_table as open_table
from .sampling_positions import SampleRange as SampleRange, iter_sample_ranges as iter_sample_ranges
