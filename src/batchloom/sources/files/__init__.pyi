from .file_opening import (
    Compression as Compression,
    get_pinned_revision as get_pinned_revision,
    get_suffix as get_suffix,
)
from .part_stream import PartStart as PartStart, Source as Source, open_source as open_source
from .record_sample import RecordSample as RecordSample, choose_random_records as choose_random_records
from .spool import Spool as Spool
