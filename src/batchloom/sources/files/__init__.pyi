from .content_detection import DetectedFile as DetectedFile
from .dataset_names import find_preset as find_preset, list_datasets as list_datasets
from .declared_formats import INPUT_FORMATS as INPUT_FORMATS, InputFormat as InputFormat
from .decompression import Compression as Compression
from .file_kinds import (
    COLUMNAR_KINDS as COLUMNAR_KINDS,
    FileKind as FileKind,
    detect_kind_by_name as detect_kind_by_name,
    get_suffix as get_suffix,
)
from .hub_datasets import (
    HubDatasetName as HubDatasetName,
    find_hub_name as find_hub_name,
    get_pinned_revision as get_pinned_revision,
    pin_revision as pin_revision,
    strip_revision as strip_revision,
)
from .json_scan import scan_brackets as scan_brackets
from .link_bounds import LinkBounds as LinkBounds, is_inside as is_inside
from .part_stream import open_source as open_source
from .source_rules import (
    SPLIT_WORDS as SPLIT_WORDS,
    PartStart as PartStart,
    Source as Source,
    choose_read_method as choose_read_method,
    is_sequential as is_sequential,
    is_splittable as is_splittable,
)
from .spool import Spool as Spool
