from .files.part_stream import (
    PartStream as PartStream,
    ReadLimits as ReadLimits,
    ReadRules as ReadRules,
    SourcePart as SourcePart,
)
from .folder_walk import (
    STORE_MARKER_NAME as STORE_MARKER_NAME,
    LinkBounds as LinkBounds,
    is_inside as is_inside,
    strip_wildcard_part as strip_wildcard_part,
)
from .formats.format_registry import (
    DeclaredInput as DeclaredInput,
    DetectedFile as DetectedFile,
    detect_kind_by_name as detect_kind_by_name,
)
from .formats.text_format import find_document_end as find_document_end
from .hf_datasets import (
    HubDatasetName as HubDatasetName,
    find_hub_name as find_hub_name,
    find_preset as find_preset,
    list_datasets as list_datasets,
    parse_hub_name as parse_hub_name,
    pin_revision as pin_revision,
    strip_revision as strip_revision,
)
from .input_account import LeftOutFile as LeftOutFile
from .listing import (
    SourceListing as SourceListing,
    describe_missing_input as describe_missing_input,
    list_sources as list_sources,
)
from .part_reader import (
    PartReader as PartReader,
    RecordBounds as RecordBounds,
    SampleRange as SampleRange,
    format_record_name as format_record_name,
    iter_sample_ranges as iter_sample_ranges,
    locate_record as locate_record,
    make_bad_record_error as make_bad_record_error,
    open_table as open_table,
    split_source as split_source,
)
from .prefetching import prefetch_sources as prefetch_sources
from .splits import (
    SPLIT_PROBLEM as SPLIT_PROBLEM,
    RowRange as RowRange,
    SplitRequest as SplitRequest,
    parse_split as parse_split,
)
