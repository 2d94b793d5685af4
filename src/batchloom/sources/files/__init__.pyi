from .decompression import Compression as Compression
from .file_opening import get_pinned_revision as get_pinned_revision, get_suffix as get_suffix
from .part_stream import open_source as open_source
from .source_rules import PartStart as PartStart, Source as Source
from .spool import Spool as Spool
