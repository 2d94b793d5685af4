from .batch_media import BatchMedia as BatchMedia
from .media_stores import check_store_media as check_store_media
from .missing_media import (
    SubsetMissingMedia as SubsetMissingMedia,
    read_missing_media as read_missing_media,
    write_missing_media as write_missing_media,
)
