from .archives import BOMB_BYTES as BOMB_BYTES, BOMB_RATIO as BOMB_RATIO, Archive as Archive
from .content_detection import (
    DetectedFile as DetectedFile,
    detect_declared_kind as detect_declared_kind,
    detect_file_kind as detect_file_kind,
    list_archive_sources as list_archive_sources,
)
from .dataset_names import (
    find_preset as find_preset,
    list_datasets as list_datasets,
    list_preset_names as list_preset_names,
)
from .declared_formats import (
    INPUT_FORMATS as INPUT_FORMATS,
    DeclaredInput as DeclaredInput,
    InputFormat as InputFormat,
    describe_format_mismatch as describe_format_mismatch,
    get_declared_input as get_declared_input,
    matches_format as matches_format,
    reraise_with_location as reraise_with_location,
)
from .decompression import (
    Compression as Compression,
    DecompressionError as DecompressionError,
    ReadOnlyFile as ReadOnlyFile,
    make_decompressor as make_decompressor,
)
from .file_kinds import (
    COLUMNAR_KINDS as COLUMNAR_KINDS,
    FileDetection as FileDetection,
    FileKind as FileKind,
    describe_other_format as describe_other_format,
    detect_archive_by_name as detect_archive_by_name,
    detect_kind_by_name as detect_kind_by_name,
    get_suffix as get_suffix,
    needs_content as needs_content,
)
from .file_opening import find_local_path as find_local_path, open_location as open_location
from .hub_datasets import (
    HubDatasetName as HubDatasetName,
    download_to_cache as download_to_cache,
    find_hub_name as find_hub_name,
    get_pinned_revision as get_pinned_revision,
    list_hub_files as list_hub_files,
    parse_hub_name as parse_hub_name,
    pin_revision as pin_revision,
    strip_revision as strip_revision,
)
from .json_scan import scan_brackets as scan_brackets
from .json_shape import WRAPPERS as WRAPPERS
from .link_bounds import LinkBounds as LinkBounds, is_inside as is_inside
from .part_stream import PartStream as PartStream, open_source as open_source
from .prefetch import prefetch_files as prefetch_files, prefetch_inputs as prefetch_inputs
from .saved_datasets import (
    find_saved_split as find_saved_split,
    is_saved_dataset as is_saved_dataset,
    list_saved_files as list_saved_files,
)
from .source_names import UniqueNames as UniqueNames, list_paths_and_labels as list_paths_and_labels
from .source_rules import (
    BOM as BOM,
    SPLIT_WORDS as SPLIT_WORDS,
    PartStart as PartStart,
    ReadLimits as ReadLimits,
    ReadMethod as ReadMethod,
    ReadRules as ReadRules,
    Source as Source,
    SourcePart as SourcePart,
    choose_read_method as choose_read_method,
    is_sequential as is_sequential,
    is_splittable as is_splittable,
)
from .spool import Spool as Spool
