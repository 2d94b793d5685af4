from .block_file import fetch_once as fetch_once, open_blocks as open_blocks
from .cache_files import LOG as LOG, TABLE as TABLE, BlockCache as BlockCache
from .cached_blocks import (
    EMPTY as EMPTY,
    Held as Held,
    Places as Places,
    Segment as Segment,
    Segments as Segments,
    added as added,
    cut_out as cut_out,
    joint as joint,
    views_of as views_of,
    without as without,
)
from .client import (
    FIRST_TRIES as FIRST_TRIES,
    fetch as fetch,
    fetch_whole as fetch_whole,
    first_contact as first_contact,
    info_of as info_of,
    is_web as is_web,
    no_data as no_data,
    no_stretches as no_stretches,
    patience as patience,
    whole as whole,
)
from .hub_endpoint import check_hub_address as check_hub_address
from .intervals import (
    BLOCK as BLOCK,
    Extents as Extents,
    blocks_of as blocks_of,
    bridged as bridged,
    cut as cut,
    grouped as grouped,
    joined as joined,
    minus as minus,
    parted as parted,
    touching as touching,
)
from .objects import (
    forget_looks as forget_looks,
    has_ranges as has_ranges,
    look_ahead as look_ahead,
    remote_files as remote_files,
    remote_glob as remote_glob,
    remote_status as remote_status,
    status_of as status_of,
)
from .parallel_map import begun as begun
from .range_requests import RangeError as RangeError, Ranges as Ranges
from .read_cache import KEPT as KEPT
from .remote_errors import fault_of as fault_of, their_errors as their_errors, told as told
from .remote_folder import FarFile as FarFile, FarFolder as FarFolder
