from .archives import BOMB_BYTES as BOMB_BYTES, BOMB_RATIO as BOMB_RATIO, Archive as Archive
from .content_detection import (
    Seen as Seen,
    archive_sources as archive_sources,
    judge_as as judge_as,
    judge_file as judge_file,
)
from .dataset_names import (
    list_datasets as list_datasets,
    preset as preset,
    preset_names as preset_names,
)
from .declared_formats import (
    FORMS as FORMS,
    Asked as Asked,
    Form as Form,
    asked_of as asked_of,
    disagreement as disagreement,
    fits as fits,
    retold as retold,
)
from .decompression import (
    Broken as Broken,
    Compression as Compression,
    OnceRead as OnceRead,
    unpacker as unpacker,
)
from .file_kinds import (
    COLUMNAR as COLUMNAR,
    Kind as Kind,
    Verdict as Verdict,
    archive_by_name as archive_by_name,
    describe_other_format as describe_other_format,
    ending_of as ending_of,
    kind_by_name as kind_by_name,
    must_look as must_look,
)
from .file_opening import open_place as open_place, path_here as path_here
from .hub_datasets import (
    HubName as HubName,
    find_hub_name as find_hub_name,
    hub_name as hub_name,
    keep_copies as keep_copies,
    list_hub as list_hub,
    pin as pin,
    revision_of as revision_of,
    unpinned as unpinned,
)
from .json_scan import scan as scan
from .json_shape import WRAPPERS as WRAPPERS
from .link_bounds import LinkBounds as LinkBounds, is_inside as is_inside
from .part_stream import PartStream as PartStream, open_source as open_source
from .prefetch import files_ahead as files_ahead, inputs_ahead as inputs_ahead
from .saved_datasets import (
    saved_files as saved_files,
    saved_marks as saved_marks,
    saved_split as saved_split,
)
from .source_names import Names as Names, paths_and_labels as paths_and_labels
from .source_rules import (
    BOM as BOM,
    SPLIT_WORDS as SPLIT_WORDS,
    Begin as Begin,
    Limits as Limits,
    Part as Part,
    ReadRules as ReadRules,
    Source as Source,
    Way as Way,
    in_order as in_order,
    splittable as splittable,
    way_of as way_of,
)
from .spool import Spool as Spool
