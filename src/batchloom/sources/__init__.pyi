from .file_positions import error_of as error_of, place_of as place_of, record_name as record_name
from .files.declared_formats import Asked as Asked
from .files.hub_datasets import hub_name as hub_name
from .files.part_stream import PartStream as PartStream
from .files.prefetch import read_ahead as read_ahead
from .files.source_names import input_labels as input_labels
from .files.source_rules import Limits as Limits, Part as Part, ReadRules as ReadRules
from .formats.text_cuts import document_end as document_end
from .listing import (
    STORE_MARK as STORE_MARK,
    Listing as Listing,
    fixed_part as fixed_part,
    list_sources as list_sources,
    not_found as not_found,
)
from .part_reader import PartReader as PartReader, parts_of as parts_of
from .record_bounds import RecordBounds as RecordBounds, open_table as open_table
from .sampling_positions import Probe as Probe, probes as probes
