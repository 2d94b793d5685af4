from .batch_media import (
    BatchMedia as BatchMedia,
    CollateRow as CollateRow,
    collate_rows as collate_rows,
    stacks_features_by_row as stacks_features_by_row,
    take_single_row as take_single_row,
)
from .media_stores import (
    StoreSource as StoreSource,
    check_media as check_media,
    read_medium as read_medium,
    read_medium_head as read_medium_head,
    read_missing_media as read_missing_media,
)
