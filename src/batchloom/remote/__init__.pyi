from .block_cache import (
    BLOCK_BYTES as BLOCK_BYTES,
    BLOCK_TABLE_DTYPE as BLOCK_TABLE_DTYPE,
    LOG as LOG,
    BlockCache as BlockCache,
)
from .block_index import (
    EMPTY_INDEX as EMPTY_INDEX,
    CachedBlocks as CachedBlocks,
    CacheFile as CacheFile,
    CacheFileSet as CacheFileSet,
    IntArray as IntArray,
    Intervals as Intervals,
    add_to_index as add_to_index,
    bridge_gaps as bridge_gaps,
    count_interval_blocks as count_interval_blocks,
    group_intervals as group_intervals,
    join_range as join_range,
    mask_overlaps as mask_overlaps,
    merge_intervals as merge_intervals,
    remove_from_index as remove_from_index,
    slice_ranges as slice_ranges,
    split_by_ranges as split_by_ranges,
    split_intervals as split_intervals,
    subtract_intervals as subtract_intervals,
    view_ranges as view_ranges,
)
from .client import (
    MAX_CONNECT_ATTEMPTS as MAX_CONNECT_ATTEMPTS,
    check_hub_endpoint as check_hub_endpoint,
    clear_status_cache as clear_status_cache,
    fetch as fetch,
    fetch_file as fetch_file,
    fetch_file_info as fetch_file_info,
    glob_remote as glob_remote,
    is_web_url as is_web_url,
    iter_web_file as iter_web_file,
    list_remote_files as list_remote_files,
    make_html_page_error as make_html_page_error,
    make_no_ranges_error as make_no_ranges_error,
    make_stat_result as make_stat_result,
    prefetch_items as prefetch_items,
    prefetch_status as prefetch_status,
    retry_transient as retry_transient,
    run_with_retries as run_with_retries,
    stat_remote as stat_remote,
    supports_ranges as supports_ranges,
)
from .range_requests import RangeError as RangeError, RangeFetcher as RangeFetcher
from .remote_errors import RemoteFault as RemoteFault, make_remote_error as make_remote_error
from .remote_file import (
    PAGE_CACHE as PAGE_CACHE,
    fetch_through_cache as fetch_through_cache,
    open_remote_file as open_remote_file,
)
from .upload import RemoteFile as RemoteFile, RemoteFolder as RemoteFolder
